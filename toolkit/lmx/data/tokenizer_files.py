"""Tokenizer files of a checkpoint: end tokens and compatibility of two tokenizers."""

from pathlib import Path
from typing import Any

from ..errors import UserError
from ..run.fs import read_json


def eos_token_ids(folder: Path) -> list[int]:
    """Every end token that config.json and generation_config.json name.

    Raises:
        UserError: one of the files cannot be read.
    """
    ids = []
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            value = read_json(folder / name).get("eos_token_id")
            ids += value if isinstance(value, list) else [value]
    return [token for token in dict.fromkeys(ids) if token is not None]


def require_same_tokenizer(
    tokenizer: Any, other: Any, *, role: str, place: str
) -> None:
    """Refuse a model whose tokens differ.

    Args:
        role: what the other model is to the first: draft, teacher.
        place: where the other model comes from.

    Raises:
        UserError: the vocabularies or the added tokens differ.
    """
    vocab, other_vocab = tokenizer.get_vocab(), other.get_vocab()
    different = {
        token
        for token in vocab.keys() | other_vocab.keys()
        if vocab.get(token) != other_vocab.get(token)
    }
    hint = f"a {role} must have the model's own tokenizer"
    if different:
        token = min(different)
        raise UserError(
            f"the {role} has other tokens than the model: {len(different):,} differ, "
            f"such as {token!r} ({vocab.get(token)} and {other_vocab.get(token)})",
            place=place,
            hint=hint,
        )
    if special := _added_tokens(tokenizer) ^ _added_tokens(other):
        raise UserError(
            f"the {role} has other special tokens than the model: {min(special)}",
            place=place,
            hint=hint,
        )


def _added_tokens(tokenizer: Any) -> set[tuple[int, str, bool]]:
    added = tokenizer.added_tokens_decoder
    return {(number, str(token), token.special) for number, token in added.items()}
