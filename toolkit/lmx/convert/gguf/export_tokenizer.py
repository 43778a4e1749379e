"""The tokenizer of a checkpoint folder as the metadata of a GGUF file."""

import json
import re
from pathlib import Path
from typing import Any

from ...errors import FAILED, UserError
from .import_tokenizer import (
    BOUNDARY,
    CONTROL,
    KEY,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    WORDS,
    cutter,
)

UNUSED, BYTE = 5, 6
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
# Tells ways to cut a text apart: digits, words, spaces, lines and other letters.
PROBE = (
    "It's 12345 (really)!\n\n  don't  WE'LL see: naïve Straße, 東京 🙂\t\r\n x_1=3.14; "
    "'quoted' ... \n"
)


def metadata(folder: Path, config: dict, rows: int) -> dict[str, Any]:
    """Keys and values of the tokenizer in a checkpoint folder.

    Args:
        rows: tokens of the model's embedding.

    Raises:
        UserError: no byte-level or sentencepiece BPE, or one llama.cpp has no name for.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made = json.loads(tokenizer.to_str())
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    tokens = [f"[PAD{number}]" for number in range(rows)]
    kinds = [UNUSED] * rows
    added = {token["content"]: token["special"] for token in made["added_tokens"]}
    if max(vocabulary.values()) >= rows:
        raise _refused("its tokens are more than the model's")
    for text, index in vocabulary.items():
        tokens[index] = text
        kinds[index] = _kind(text, made["model"], added)
    found = {f"{KEY}tokens": tokens, f"{KEY}token_type": kinds}
    found |= _pieces(tokenizer, made["model"], tokens)
    settings = _settings(folder)
    return found | _ends(tokenizer, settings, config) | _template(folder, settings)


def _kind(text: str, model: dict, added: dict[str, bool]) -> int:
    if text == model.get("unk_token"):
        return UNKNOWN
    if text in added:
        return CONTROL if added[text] else USER_DEFINED
    is_byte = model.get("byte_fallback") and BYTE_TOKEN.fullmatch(text)
    return BYTE if is_byte else NORMAL


def _pieces(tokenizer: Any, model: dict, tokens: list[str]) -> dict[str, Any]:
    """How texts become tokens: by merges, or by scores."""
    if model["type"] != "BPE":
        raise _refused(f"it is of the kind {model['type']}, not BPE")
    merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    if model.get("byte_fallback"):
        return _by_scores(tokenizer, merges, tokens)
    cut = tokenizer.pre_tokenizer
    cuts = cut.pre_tokenize_str(PROBE) if cut else None
    same = (name for name in WORDS if cutter(name).pre_tokenize_str(PROBE) == cuts)
    if (words := next(same, None)) is None:
        raise _refused("llama.cpp has no name for how it cuts words")
    return {
        f"{KEY}model": "gpt2",
        f"{KEY}pre": words,
        f"{KEY}merges": [" ".join(pair) for pair in merges],
    }


def _by_scores(tokenizer: Any, merges: list, tokens: list[str]) -> dict[str, Any]:
    """Sentencepiece's: the earlier a token is merged, the higher its score."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    begun = tokenizer.encode("a", add_special_tokens=False).tokens[0]
    return {
        f"{KEY}model": "llama",
        f"{KEY}scores": [-float(ranks.get(text, len(merges))) for text in tokens],
        f"{KEY}add_space_prefix": begun.startswith(BOUNDARY),
    }


def _ends(tokenizer: Any, settings: dict, config: dict) -> dict[str, Any]:
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    found = {}
    for ggml, name in names.items():
        token = settings.get(f"{name}_token")
        text = token["content"] if isinstance(token, dict) else token
        if text and (index := tokenizer.token_to_id(text)) is not None:
            found[f"{KEY}{ggml}_token_id"] = index
    ends = config.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    eos = found.setdefault(f"{KEY}eos_token_id", ends[0])
    if others := [end for end in ends if end not in (eos, None)]:
        found[f"{KEY}eot_token_id"] = others[0]
    first = tokenizer.encode("a").ids[0]
    found[f"{KEY}add_bos_token"] = first == found.get(f"{KEY}bos_token_id")
    return {key: value for key, value in found.items() if value is not None}


def _template(folder: Path, settings: dict) -> dict[str, str]:
    file = folder / "chat_template.jinja"
    text = file.read_text() if file.is_file() else settings.get("chat_template")
    return {"tokenizer.chat_template": text} if isinstance(text, str) else {}


def _settings(folder: Path) -> dict:
    file = folder / "tokenizer_config.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def _refused(reason: str) -> UserError:
    return UserError(
        f"the tokenizer has no form in GGUF known here: {reason}", code=FAILED
    )
