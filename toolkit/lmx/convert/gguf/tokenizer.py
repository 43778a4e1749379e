"""The tokenizer of a GGUF file's metadata as tokenizer.json, and back."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from ...data.token_bytes import BYTE_TOKEN
from ...errors import FAILED, UserError
from ...models.loader import LoadedModel

KEY = "tokenizer.ggml."
# ggml's token types.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
BOUNDARY = "▁"  # sentencepiece's space
FILES = ("tokenizer.json", "tokenizer_config.json")
LISTS = {"tokens": str, "token_type": int, "scores": float, "merges": str}
PER_TOKEN = ("token_type", "scores")
MAX_TOKEN_CHARACTERS = 10_000
# Chat templates: the only one or the one of this name, and the others.
TEMPLATE, DEFAULT = "tokenizer.chat_template", "default"
# GGUF has no key for the white space that added tokens take. If `general.name` has such
# a part, llama.cpp takes it after all but these, which the file must have.
PHI3 = re.compile(r"phi-?3", re.IGNORECASE)
PHI3_OTHERS = {"<unk>", "<s>", "<|endoftext|>"}
# ggml's names of the special tokens, and Hugging Face's.
SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
# The patterns that split a text into words before it is encoded, by llama.cpp's name;
# several patterns apply in sequence.
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = [LETTERS + r"\p{N}{1,3}" + OTHERS]
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = [r"\p{N}", GPT2]
# Takes whole words of the vocabulary without merges.
LLAMA3 = "llama-bpe"
# An exported tokenizer gets the first name that fits. The tests compare the words of
# all names with llama.cpp's.
PRE_TOKENIZERS = {
    LLAMA3: CL100K,
    "dbrx": CL100K,
    "qwen2": [LETTERS + r"\p{N}" + OTHERS],
    "deepseek-r1-qwen": [LETTERS + r"\p{N}" + OTHERS],
    "smollm": DIGITS,
    "gpt-2": [GPT2],
    "gpt-4o": [GPT4O],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "smaug-bpe": CL100K,
    "glm4": CL100K,
    "chatglm-bpe": CL100K,
    "refact": DIGITS,
    "command-r": DIGITS,
    "starcoder": DIGITS,
    "olmo": [GPT2],
}
# All patterns split this text differently: digits, words, spaces, lines, other letters.
PROBE = (
    "It's 12345 (really)!\n\n  don't  WE'LL see: naïve Straße, 東京 🙂\t\r\n x_1=3.14; "
    "'quoted' ... \n"
)


def special_token_ids(metadata: dict[str, Any]) -> dict:
    """The `bos_token_id` and `eos_token_id` of a config."""
    eos = [metadata.get(f"{KEY}{name}_token_id") for name in ("eos", "eot")]
    eos = list(dict.fromkeys(token for token in eos if token is not None))
    ids = {
        "bos_token_id": metadata.get(f"{KEY}bos_token_id"),
        "eos_token_id": eos or None,
    }
    return {name: value for name, value in ids.items() if value is not None}


def write(metadata: dict[str, Any], folder: Path, *, source: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    Args:
        source: the folder of the GGUF file. Its tokenizer files are copied if lmx
            cannot build the tokenizer.

    Raises:
        UserError: lmx cannot build the tokenizer and `source` has none.
    """
    from tokenizers import Tokenizer, decoders, models

    _check_lists(metadata)
    model = str(metadata.get(f"{KEY}model"))[:40]
    pre_tokenizer = str(metadata.get(f"{KEY}pre", "default"))[:40]
    if model == "llama":
        tokenizer = _build_sentencepiece(metadata)
    elif model == "gpt2" and pre_tokenizer in PRE_TOKENIZERS:
        # Byte-level BPE, as in GPT-2.
        vocabulary = {text: i for i, text in enumerate(metadata[f"{KEY}tokens"])}
        merges = [tuple(merge.split(" ")) for merge in metadata[f"{KEY}merges"]]
        is_llama3 = pre_tokenizer == LLAMA3
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=is_llama3))
        tokenizer.pre_tokenizer = byte_level_pre_tokenizer(pre_tokenizer)
        tokenizer.decoder = decoders.ByteLevel()
    elif all((source / name).is_file() for name in FILES):
        for name in FILES:
            shutil.copyfile(source / name, folder / name)
        return
    else:
        raise UserError(
            f"the tokenizer in this file ({model}, {pre_tokenizer}) is not supported",
            hint="put tokenizer.json and tokenizer_config.json of the model beside it",
        )
    _add_special_tokens(tokenizer, metadata)
    tokenizer.save(str(folder / FILES[0]))
    tokens = metadata[f"{KEY}tokens"]
    settings = {
        f"{name}_token": tokens[metadata[f"{KEY}{ggml}_token_id"]]
        for ggml, name in SPECIAL_TOKENS.items()
        if f"{KEY}{ggml}_token_id" in metadata
    }
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["clean_up_tokenization_spaces"] = False
    templates = [
        {"name": key[len(TEMPLATE) + 1 :] or DEFAULT, "template": text}
        for key, text in metadata.items()
        if f"{key}.".startswith(f"{TEMPLATE}.") and isinstance(text, str) and text
    ]
    if [template["name"] for template in templates] == [DEFAULT]:
        settings["chat_template"] = templates[0]["template"]
    elif templates:
        settings["chat_template"] = templates
    (folder / FILES[1]).write_text(json.dumps(settings, indent=2) + "\n")


def _check_lists(metadata: dict[str, Any]) -> None:
    """Check the lists of the tokenizer and the ids of its special tokens.

    Raises:
        UserError: names the key.
    """
    tokens = metadata.get(f"{KEY}tokens", [])
    for name, kind in LISTS.items():
        values = metadata.get(f"{KEY}{name}")
        is_list = isinstance(values, list) and all(isinstance(v, kind) for v in values)
        if values is not None and not is_list:
            raise UserError(f"{KEY}{name} is not a list of {kind.__name__} values")
        if name in PER_TOKEN and values is not None and len(values) != len(tokens):
            raise UserError(
                f"{KEY}{name} has {len(values):,} values for {len(tokens):,} tokens"
            )
    if (longest := max(map(len, tokens), default=0)) > MAX_TOKEN_CHARACTERS:
        raise UserError(f"{KEY}tokens has a token of {longest:,} characters")
    for name in (*SPECIAL_TOKENS, "eot"):
        index = metadata.get(f"{KEY}{name}_token_id")
        if index is not None and index not in range(len(tokens)):
            raise UserError(
                f"{KEY}{name}_token_id is {str(index)[:40]}, and the file has "
                f"{len(tokens):,} tokens"
            )


def to_metadata(loaded: LoadedModel, vocab_size: int, *, name: str) -> dict[str, Any]:
    """The metadata of a model's tokenizer, and its name.

    Args:
        vocab_size: rows of the model's embedding.
        name: changed if llama.cpp would take it for that of another tokenizer.

    Raises:
        UserError: the tokenizer is neither byte-level nor sentencepiece BPE, or
            llama.cpp has no name for its pre-tokenizer, or splits texts differently.
    """
    from tokenizers import Tokenizer

    folder = loaded.path
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise _unsupported("it has no tokenizer.json")
    tokenizer = Tokenizer.from_file(str(file))
    serialized = json.loads(tokenizer.to_str())
    model = serialized["model"]
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if max(vocabulary.values()) >= vocab_size:
        raise _unsupported("it has more tokens than the model")
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [UNUSED] * vocab_size
    added = {token["content"]: token["special"] for token in serialized["added_tokens"]}
    for text, index in vocabulary.items():
        tokens[index] = text
        if text == model.get("unk_token"):
            types[index] = UNKNOWN
        elif text in added:
            types[index] = CONTROL if added[text] else USER_DEFINED
        else:
            is_byte = model.get("byte_fallback") and BYTE_TOKEN.fullmatch(text)
            types[index] = BYTE if is_byte else NORMAL
    file = folder / FILES[1]
    settings = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    metadata = {f"{KEY}tokens": tokens, f"{KEY}token_type": types}
    metadata |= _model_metadata(tokenizer, model, tokens)
    for ggml, special in SPECIAL_TOKENS.items():
        token = settings.get(f"{special}_token")
        text = token["content"] if isinstance(token, dict) else token
        if text and (index := tokenizer.token_to_id(text)) is not None:
            metadata[f"{KEY}{ggml}_token_id"] = index
    ids = loaded.config.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [ids]
    eos = metadata.setdefault(f"{KEY}eos_token_id", ids[0])
    if others := [token for token in ids if token not in (eos, None)]:
        metadata[f"{KEY}eot_token_id"] = others[0]
    first = tokenizer.encode("a").ids[0]
    metadata[f"{KEY}add_bos_token"] = first == metadata.get(f"{KEY}bos_token_id")
    metadata = {key: value for key, value in metadata.items() if value is not None}
    metadata["general.name"] = _model_name(name, serialized["added_tokens"], metadata)
    return metadata | _template_metadata(loaded.tokenizer.chat_template)


def byte_level_pre_tokenizer(name: str) -> Any:
    """The pre-tokenizer that llama.cpp calls by this name, one of `PRE_TOKENIZERS`."""
    from tokenizers import Regex, pre_tokenizers

    patterns = PRE_TOKENIZERS[name]
    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, letters])


def _build_sentencepiece(metadata: dict[str, Any]) -> Any:
    """Sentencepiece BPE with byte fallback, as in Llama 2."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, types = metadata[f"{KEY}tokens"], metadata[f"{KEY}token_type"]
    vocabulary = {text: i for i, text in enumerate(tokens)}
    # All pairs of tokens that form a token, by its score, the highest first.
    ranked, scores = [], metadata[f"{KEY}scores"]
    for text, index in vocabulary.items():
        for cut in range(1, len(text)) if types[index] == NORMAL else ():
            left, right = text[:cut], text[cut:]
            if left in vocabulary and right in vocabulary:
                pair = vocabulary[left], vocabulary[right]
                ranked.append((-scores[index], *pair, left, right))
    model = models.BPE(
        vocabulary,
        [(left, right) for *_, left, right in sorted(ranked)],
        unk_token=tokens[types.index(UNKNOWN)] if UNKNOWN in types else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    space_prefix = metadata.get(f"{KEY}add_space_prefix", True)
    prefix = [normalizers.Prepend(BOUNDARY)] * space_prefix
    spaces = normalizers.Replace(" ", BOUNDARY)
    tokenizer.normalizer = normalizers.Sequence([*prefix, spaces])
    steps = [decoders.Replace(BOUNDARY, " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] * space_prefix
    tokenizer.decoder = decoders.Sequence([*steps, *strip])
    return tokenizer


def _add_special_tokens(tokenizer: Any, metadata: dict[str, Any]) -> None:
    """Add the tokens that are matched before the text is split, and the BOS."""
    from tokenizers import AddedToken, processors

    tokens, types = metadata[f"{KEY}tokens"], metadata.get(f"{KEY}token_type", [])
    is_phi3 = PHI3.search(str(metadata.get("general.name")))
    take_space = _phi3_tokens(metadata) if is_phi3 else set()
    for text, token_type in zip(tokens, types, strict=False):
        added = AddedToken(
            text,
            rstrip=text in take_space,
            normalized=False,
            special=token_type != USER_DEFINED,
        )
        if token_type == USER_DEFINED:
            tokenizer.add_tokens([added])
        elif token_type in (CONTROL, UNKNOWN):
            tokenizer.add_special_tokens([added])
    bos = metadata.get(f"{KEY}bos_token_id")
    kind = metadata.get(f"{KEY}model"), metadata.get(f"{KEY}pre")
    default = "llama" in kind or LLAMA3 in kind
    if bos is not None and metadata.get(f"{KEY}add_bos_token", default):
        first = tokens[bos]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[first, "$A"],
            pair=[first, "$A", first, "$B"],
            special_tokens=[(first, bos)],
        )


def _model_metadata(tokenizer: Any, model: dict, tokens: list[str]) -> dict[str, Any]:
    """How words become tokens: by merges, or by scores (sentencepiece)."""
    if model["type"] != "BPE":
        raise _unsupported(f"its type is {model['type']}, not BPE")
    merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    if model.get("byte_fallback"):
        # The earlier a merge, the higher the score of its token.
        ranks: dict[str, int] = {}
        for rank, (left, right) in enumerate(merges):
            ranks.setdefault(left + right, rank)
        first = tokenizer.encode("a", add_special_tokens=False).tokens[0]
        return {
            f"{KEY}model": "llama",
            f"{KEY}scores": [-float(ranks.get(text, len(merges))) for text in tokens],
            f"{KEY}add_space_prefix": first.startswith(BOUNDARY),
        }
    current = tokenizer.pre_tokenizer
    words = current.pre_tokenize_str(PROBE) if current else None
    for name in PRE_TOKENIZERS:
        if name == LLAMA3 and not model.get("ignore_merges"):
            continue
        if byte_level_pre_tokenizer(name).pre_tokenize_str(PROBE) == words:
            return {
                f"{KEY}model": "gpt2",
                f"{KEY}pre": name,
                f"{KEY}merges": [" ".join(pair) for pair in merges],
            }
    raise _unsupported("llama.cpp has no name for its pre-tokenizer")


def _template_metadata(chat_template: str | dict[str, str] | None) -> dict[str, Any]:
    """Chat templates by llama.cpp's keys."""
    if not isinstance(chat_template, dict):
        return {TEMPLATE: chat_template} if chat_template else {}
    named = {
        re.sub(r"[^A-Za-z0-9]", "_", name): template
        for name, template in chat_template.items()
    }
    default = _template_metadata(named.pop(DEFAULT, None))
    others = {f"{TEMPLATE}.{name}": template for name, template in named.items()}
    return default | others | ({f"{TEMPLATE}s": [*named]} if named else {})


def _model_name(name: str, added: list[dict], metadata: dict[str, Any]) -> str:
    """The name by which llama.cpp knows which added tokens take white space.

    Raises:
        UserError: others do.
    """
    differing = {t["content"] for t in added if t["lstrip"] or t["single_word"]}
    taking = {t["content"] for t in added if t["rstrip"]}
    differing |= taking and taking ^ _phi3_tokens(metadata)
    if differing:
        flags = "rstrip, lstrip or single_word"
        raise _unsupported(f"llama.cpp does not read {flags} of {min(differing)!r}")
    if not taking:
        return PHI3.sub("phi_3", name)
    return name if PHI3.search(name) else f"{name}-phi3"


def _phi3_tokens(metadata: dict[str, Any]) -> set[str]:
    """The tokens after which llama.cpp takes white space in a model named Phi-3."""
    tokens, types = metadata[f"{KEY}tokens"], metadata.get(f"{KEY}token_type", [])
    kinds = (UNKNOWN, CONTROL, USER_DEFINED)
    added = {t for t, kind in zip(tokens, types, strict=False) if kind in kinds}
    return added - PHI3_OTHERS if {*tokens} >= {"</s>", *PHI3_OTHERS} else set()


def _unsupported(reason: str) -> UserError:
    return UserError(f"GGUF cannot hold this tokenizer: {reason}", code=FAILED)
