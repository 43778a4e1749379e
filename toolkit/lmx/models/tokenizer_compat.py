"""Whether two tokenizers mean the same by a token."""

from typing import Any

from ..errors import UserError


def require_same_tokenizer(model: Any, other: Any, *, role: str, place: str) -> None:
    """Refuse a model whose tokens mean something else.

    Args:
        model, other: tokenizers.
        role: what the other model is to the first: draft, teacher.
        place: where the other one comes from.

    Raises:
        UserError: the vocabularies or the added tokens are not the same.
    """
    own, theirs = model.get_vocab(), other.get_vocab()
    pairs = {
        token
        for token in own.keys() | theirs.keys()
        if own.get(token) != theirs.get(token)
    }
    hint = f"a {role} must have the model's own tokenizer"
    if pairs:
        token = min(pairs)
        raise UserError(
            f"the {role} has other tokens than the model: {len(pairs):,} differ, "
            f"such as {token!r} ({own.get(token)} and {theirs.get(token)})",
            place=place,
            hint=hint,
        )
    if strange := _added(model).symmetric_difference(_added(other)):
        raise UserError(
            f"the {role} has other special tokens than the model: {min(strange)}",
            place=place,
            hint=hint,
        )


def _added(tokenizer: Any) -> set[tuple[int, str, bool]]:
    added = tokenizer.added_tokens_decoder
    return {(number, str(token), token.special) for number, token in added.items()}
