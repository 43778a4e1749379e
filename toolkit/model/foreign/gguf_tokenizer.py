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
# How a text is cut into words before it is encoded, by llama.cpp's name for it.
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = {
    "llama-bpe": LETTERS + r"\p{N}{1,3}" + REST,
    "qwen2": LETTERS + r"\p{N}" + REST,
    "gpt-2": None,
    "default": None,
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
        beside: a folder whose own tokenizer.json goes before what the file carries.

    Raises:
        UserError: a kind of tokenizer that cannot be made here, and none beside.
    """
    if all((beside / name).is_file() for name in FILES):
        for name in FILES:
            shutil.copyfile(beside / name, folder / name)
        return
    model, words = metadata.get(f"{KEY}model"), metadata.get(f"{KEY}pre", "default")
    if model == "llama":
        tokenizer = _by_scores(metadata)
    elif model == "gpt2" and words in WORDS:
        tokenizer = _by_merges(metadata, WORDS[words], ignore=words == "llama-bpe")
    else:
        raise UserError(
            f"the tokenizer in this file ({model}, {words}) cannot be made here",
            hint="put tokenizer.json and tokenizer_config.json of the model beside it",
        )
    _add_tokens(tokenizer, metadata)
    tokenizer.save(str(folder / FILES[0]))
    (folder / FILES[1]).write_text(json.dumps(_settings(metadata), indent=2) + "\n")


def _by_merges(metadata: dict[str, Any], words: str | None, *, ignore: bool) -> Any:
    """Byte-level BPE, as in GPT-2."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {text: i for i, text in enumerate(metadata[f"{KEY}tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata[f"{KEY}merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=ignore))
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
    cut = [pre_tokenizers.Split(Regex(words), "isolated")] if words else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cut, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


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
    by_default = metadata.get(f"{KEY}model") == "llama"
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
