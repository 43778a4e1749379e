"""The tokenizer that a GGUF file carries, as tokenizer.json."""

import json
import shutil
from pathlib import Path
from typing import Any

from ...errors import UserError

KEY = "tokenizer.ggml."
# ggml's kinds of tokens.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
BOUNDARY = "▁"  # what sentencepiece has for a space
FILES = ("tokenizer.json", "tokenizer_config.json")
# What cuts a text into words before it is encoded, by llama.cpp's name for it; patterns
# follow one another.
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = "llama-bpe"
WORDS = {
    LLAMA3: [LETTERS + r"\p{N}{1,3}" + REST],
    "qwen2": [LETTERS + r"\p{N}" + REST],
    "deepseek-r1-qwen": [LETTERS + r"\p{N}" + REST],
    "smollm": [r"\p{N}", GPT2],
    "gpt-2": [GPT2],
    "default": [GPT2],
}


def ends(metadata: dict[str, Any]) -> dict:
    """The config's entries on the tokens that begin and end a text."""
    begin = metadata.get(f"{KEY}bos_token_id")
    end = [metadata.get(f"{KEY}{name}_token_id") for name in ("eos", "eot")]
    found = list(dict.fromkeys(token for token in end if token is not None))
    entries = {"bos_token_id": begin, "eos_token_id": found or None}
    return {name: value for name, value in entries.items() if value is not None}


def write(metadata: dict[str, Any], folder: Path, *, beside: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    Args:
        beside: a folder that may have both, for kinds that cannot be made here.

    Raises:
        UserError: such a kind, and none beside.
    """
    model, words = metadata.get(f"{KEY}model"), metadata.get(f"{KEY}pre", "default")
    if model == "llama":
        tokenizer = _by_scores(metadata)
    elif model == "gpt2" and words in WORDS:
        tokenizer = _by_merges(metadata, words)
    elif all((beside / name).is_file() for name in FILES):
        for name in FILES:
            shutil.copyfile(beside / name, folder / name)
        return
    else:
        raise UserError(
            f"the tokenizer in this file ({model}, {words}) cannot be made here",
            hint="put tokenizer.json and tokenizer_config.json of the model beside it",
        )
    _add_tokens(tokenizer, metadata)
    tokenizer.save(str(folder / FILES[0]))
    (folder / FILES[1]).write_text(json.dumps(_settings(metadata), indent=2) + "\n")


def _by_merges(metadata: dict[str, Any], words: str) -> Any:
    """Byte-level BPE, as in GPT-2."""
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {text: i for i, text in enumerate(metadata[f"{KEY}tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata[f"{KEY}merges"]]
    whole = words == LLAMA3
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=whole))
    tokenizer.pre_tokenizer = cutter(words)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def cutter(words: str) -> Any:
    """What cuts a text as llama.cpp does by this name, one of `WORDS`."""
    from tokenizers import Regex, pre_tokenizers

    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in WORDS[words]]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*cuts, letters])


def _by_scores(metadata: dict[str, Any]) -> Any:
    """Sentencepiece's BPE with bytes for what it does not know, as in Llama 2."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, kinds = metadata[f"{KEY}tokens"], metadata[f"{KEY}token_type"]
    vocabulary = {text: i for i, text in enumerate(tokens)}
    unknown = tokens[kinds.index(UNKNOWN)] if UNKNOWN in kinds else None
    model = models.BPE(
        vocabulary,
        _merges(vocabulary, metadata[f"{KEY}scores"], kinds),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    begins = metadata.get(f"{KEY}add_space_prefix", True)
    prefix = [normalizers.Prepend(BOUNDARY)] * begins
    spaces = normalizers.Replace(" ", BOUNDARY)
    tokenizer.normalizer = normalizers.Sequence([*prefix, spaces])
    steps = [decoders.Replace(BOUNDARY, " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] * begins
    tokenizer.decoder = decoders.Sequence([*steps, *strip])
    return tokenizer


def _merges(
    vocabulary: dict[str, int], scores: list[float], kinds: list[int]
) -> list[tuple[str, str]]:
    """Every way to make a token of two, the tokens of the highest score first."""
    found = []
    for text, index in vocabulary.items():
        cuts = range(1, len(text)) if kinds[index] == NORMAL else ()
        for cut in cuts:
            left, right = text[:cut], text[cut:]
            if left in vocabulary and right in vocabulary:
                pair = vocabulary[left], vocabulary[right]
                found.append((-scores[index], *pair, left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _add_tokens(tokenizer: Any, metadata: dict[str, Any]) -> None:
    """Tokens that are found before a text is cut, and the one a text begins with."""
    from tokenizers import AddedToken, processors

    tokens, kinds = metadata[f"{KEY}tokens"], metadata.get(f"{KEY}token_type", [])
    for text, kind in zip(tokens, kinds, strict=False):
        added = AddedToken(text, normalized=False, special=kind != USER_DEFINED)
        if kind == USER_DEFINED:
            tokenizer.add_tokens([added])
        elif kind in (CONTROL, UNKNOWN):
            tokenizer.add_special_tokens([added])
    begin = metadata.get(f"{KEY}bos_token_id")
    kind = metadata.get(f"{KEY}model"), metadata.get(f"{KEY}pre")
    by_default = "llama" in kind or LLAMA3 in kind
    if begin is not None and metadata.get(f"{KEY}add_bos_token", by_default):
        first = tokens[begin]
        template = processors.TemplateProcessing(
            single=[first, "$A"],
            pair=[first, "$A", first, "$B"],
            special_tokens=[(first, begin)],
        )
        tokenizer.post_processor = template


def _settings(metadata: dict[str, Any]) -> dict:
    tokens = metadata[f"{KEY}tokens"]
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    settings = {
        f"{name}_token": tokens[metadata[f"{KEY}{ggml}_token_id"]]
        for ggml, name in names.items()
        if f"{KEY}{ggml}_token_id" in metadata
    }
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    template = metadata.get("tokenizer.chat_template")
    return settings | ({"chat_template": template} if template else {})
