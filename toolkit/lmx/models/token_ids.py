"""The border between a tokenizer and a model: ids that the model has no row for.

MLX reads and writes out of bounds for them. Some published tokenizers have such tokens,
as for images, so only a text that contains one is refused.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import UserError


class CheckedBackend:
    """A `tokenizers.Tokenizer` that encodes no text to ids beyond a limit."""

    def __init__(self, backend: Any, limit: int):
        vars(self).update(_backend=backend, _limit=limit)

    def __getattr__(self, name: str) -> Any:
        # A copy has no backend at first.
        if name == "_backend":
            raise AttributeError(name)
        value = getattr(self._backend, name)
        if not name.startswith("encode"):
            return value

        def encode(*args: Any, **options: Any) -> Any:
            result = value(*args, **options)
            for encoding in result if isinstance(result, list) else [result]:
                check_ids(encoding.ids, self._limit, self._backend.id_to_token)
            return result

        return encode

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._backend, name, value)


def check_ids(
    ids: Sequence[int], limit: int, token_of: Callable[[int], str | None]
) -> None:
    """Refuse ids that a model of `limit` tokens does not have.

    Raises:
        UserError: naming the token.
    """
    if len(ids) and not 0 <= min(ids) <= max(ids) < limit:
        wrong = next(i for i in ids if not 0 <= i < limit)
        name = f"token {token_of(wrong)!r} has the id" if wrong >= 0 else "prompt has"
        raise UserError(
            f"the {name} {wrong}, but the model has only the ids 0 to {limit - 1:,}",
            hint="remove the token from the text, or add a row for it to the model",
        )


def guard(tokenizer: Any, limit: int) -> None:
    """Let mlx-lm's wrapper of a tokenizer refuse texts with ids beyond a limit.

    Raises:
        UserError: a token that begins or ends texts is beyond it, or the tokenizer has
            no backend that can be checked.
    """
    outside = {i: t for t, i in tokenizer.get_vocab().items() if i >= limit}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    ends = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    check_ids(sorted(outside.keys() & ends if backend else outside), limit, outside.get)
    if outside:
        # mlx-lm wraps transformers' tokenizer, which wraps the backend.
        tokenizer._tokenizer._tokenizer = CheckedBackend(backend, limit)
