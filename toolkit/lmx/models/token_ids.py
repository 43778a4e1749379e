"""The border between a tokenizer and a model: ids that the model has no row for.

MLX reads and writes out of bounds for them. Some published tokenizers have such tokens,
as for images, so they are refused when a text contains one.
"""

from typing import Any

from ..errors import UserError

HINT = "remove the token from the text, or resize the model's embedding to include it"


class CheckedBackend:
    """A `tokenizers.Tokenizer` whose encodings hold no id beyond the model's.

    Args:
        limit: number of tokens of the model.
    """

    def __init__(self, backend: Any, limit: int):
        vars(self).update(_backend=backend, _limit=limit)

    def __getattr__(self, name: str) -> Any:
        # While it is copied, there is no backend yet.
        if name in ("_backend", "_limit"):
            raise AttributeError(name)
        value = getattr(self._backend, name)
        return self._checked(value) if name.startswith("encode") else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._backend, name, value)

    def _checked(self, encode: Any) -> Any:
        def checked(*args: Any, **options: Any) -> Any:
            result = encode(*args, **options)
            for encoding in result if isinstance(result, list) else [result]:
                check_ids(encoding.ids, self._limit, self._backend.id_to_token)
            return result

        return checked


def check_ids(ids: Any, limit: int, token_of: Any) -> None:
    """Refuse ids that a model of `limit` tokens does not have.

    Args:
        token_of: the token of an id, for the message.

    Raises:
        UserError: naming the token.
    """
    if len(ids) and not 0 <= min(ids) <= max(ids) < limit:
        wrong = next(i for i in ids if not 0 <= i < limit)
        token = token_of(wrong) if wrong >= 0 else None
        raise UserError(
            f"the token {token!r} has the id {wrong}, but the model has only the ids "
            f"0 to {limit - 1:,}",
            hint=HINT,
        )


def guard(tokenizer: Any, limit: int, place: str) -> None:
    """Let a tokenizer refuse texts with tokens that the model does not have.

    Args:
        tokenizer: mlx-lm's wrapper.

    Raises:
        UserError: a token that begins or ends texts is one of them, or the tokenizer
            has no backend that can be checked.
    """
    outside = {i: t for t, i in tokenizer.get_vocab().items() if i >= limit}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    ends = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    refused = outside.keys() & ends if backend else outside.keys()
    if refused:
        index = min(refused)
        raise UserError(
            f"the tokenizer's token {outside[index]!r} has the id {index}, but the "
            f"model has only the ids 0 to {limit - 1:,}",
            place=place,
            hint="resize the model's embedding, or remove the token",
        )
    if outside:
        # mlx-lm wraps transformers' tokenizer, which wraps the backend.
        tokenizer._tokenizer._tokenizer = CheckedBackend(backend, limit)
