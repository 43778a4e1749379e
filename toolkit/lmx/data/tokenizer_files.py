"""Tokenizer files of a checkpoint: end tokens and compatibility of two tokenizers."""

from pathlib import Path
from typing import Any

from ..config.text_files import require_regular
from ..errors import UserError, library_errors
from ..files.json_files import MAX_JSON_BYTES, read_json

# Files that transformers and mlx-lm read as JSON objects, besides tokenizer.json.
OBJECTS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.json",
    "vocab.json",
)
TEXTS = ("chat_template.jinja", "merges.txt", "vocab.txt")
# Settings of tokenizer_config.json, and their types.
SETTINGS = {
    "chat_template": str | list | dict,
    "tokenizer_class": str,
    "model_max_length": int | float,
    "added_tokens_decoder": dict,
    "auto_map": dict | list | str,
    "tool_parser_type": str,
    "chat_template_type": str,
    "clean_up_tokenization_spaces": bool,
} | dict.fromkeys(
    ("bos_token", "eos_token", "unk_token", "pad_token", "mask_token"), str | dict
)
# Where a folder names its end tokens; mlx-lm writes the last.
END_TOKENS = dict.fromkeys(("config.json", "generation_config.json"), "eos_token_id")
END_TOKENS["tokenizer_config.json"] = "eos_token_ids"


def eos_token_ids(folder: Path) -> list[int]:
    """Every end token that the model's files and tokenizer_config.json name.

    Raises:
        UserError: one of the files cannot be read.
    """
    ids = []
    for name, key in END_TOKENS.items():
        if (folder / name).is_file():
            _require_object(folder / name)
            value = read_json(folder / name).get(key)
            some = [] if value is None else value if type(value) is list else [value]
            if not all(type(token) is int and token >= 0 for token in some):
                raise UserError(
                    f"{key} is {str(value)[:40]}; it must be a token id or a "
                    "list of token ids",
                    place=str(folder / name),
                    hint="copy the value from the tokenizer, or remove the key",
                )
            ids += some
    return list(dict.fromkeys(ids))


def check_tokenizer_files(folder: Path) -> dict:
    """Check the tokenizer files of a folder, as far as their kind tells.

    Returns:
        The content of tokenizer_config.json; empty if there is none.

    Raises:
        UserError: a file cannot be read, is too large, or has a setting of a wrong
            type.
    """
    for name in ("tokenizer.json", "tokenizer.model", *TEXTS):
        if (file := folder / name).exists():
            require_regular(file, max_bytes=MAX_JSON_BYTES)
            if name in TEXTS:
                with library_errors("not UTF-8 text", place=file):
                    file.read_text(encoding="utf-8")
    values: dict[str, dict] = {}
    for name in OBJECTS:
        if (file := folder / name).exists():
            values[name] = read_json(file)
            if not values[name]:
                _require_object(file)
    settings = values.get("tokenizer_config.json", {})
    for key, kind in SETTINGS.items():
        value = settings.get(key)
        if value is not None and not isinstance(value, kind):
            raise UserError(
                f"{key} is {str(value)[:40]!r}, a value of a wrong type",
                place=str(folder / "tokenizer_config.json"),
                hint="copy the file from the model that the tokenizer belongs to",
            )
    return settings


def _require_object(file: Path) -> None:
    """Raise UserError if a JSON file holds another value than an object."""
    if file.read_bytes().strip()[:1] != b"{":
        raise UserError("this is no JSON object", place=str(file))


def require_same_tokenizer(tokenizer: Any, other: Any, *, place: str) -> None:
    """Refuse a draft model whose tokens differ.

    Args:
        other: of the draft.
        place: where the draft comes from.

    Raises:
        UserError: the vocabularies or the added tokens differ.
    """
    if difference := tokenizer_difference(tokenizer, other):
        raise UserError(
            f"the draft has {difference}",
            place=place,
            hint="a draft must have the model's own tokenizer",
        )


def tokenizer_difference(tokenizer: Any, other: Any) -> str | None:
    """What another model's tokenizer has that this model's has not; None = nothing."""
    vocab, other_vocab = tokenizer.get_vocab(), other.get_vocab()
    different = {
        token
        for token in vocab.keys() | other_vocab.keys()
        if vocab.get(token) != other_vocab.get(token)
    }
    if different:
        token = min(different)
        return (
            f"other tokens than the model: {len(different):,} differ, such as "
            f"{token!r} ({vocab.get(token)} and {other_vocab.get(token)})"
        )
    if special := _added_tokens(tokenizer) ^ _added_tokens(other):
        return f"other special tokens than the model: {min(special)}"
    return None


def _added_tokens(tokenizer: Any) -> set[tuple[int, str, bool]]:
    added = tokenizer.added_tokens_decoder
    return {(number, str(token), token.special) for number, token in added.items()}
