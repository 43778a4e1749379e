"""The fewest tokens of a completion: until then, no stop token may come."""

from collections.abc import Collection, Sequence

import numpy as np

from ..errors import UserError
from .grammar_matcher import ALL, GrammarMatcher, allows, set_bit
from .thinking import ThinkingMatcher


class MinTokensMatcher:
    """Refuses the stop tokens of a completion until it has enough others.

    It has the methods of `GrammarMatcher`. A grammar that allows nothing else still
    ends the completion.

    Args:
        answer: what the completion has to match besides; None = nothing.
        stop_tokens: of the request.
        count: tokens of the completion before a stop token.
    """

    def __init__(
        self,
        answer: GrammarMatcher | ThinkingMatcher | None,
        stop_tokens: Collection[int],
        count: int,
    ):
        self._answer, self._stop_tokens, self._left = answer, stop_tokens, count

    @property
    def is_free(self) -> bool:
        """Whether any token may follow, until the end."""
        return self._left <= 0 and (self._answer is None or self._answer.is_free)

    def advance(self, token: int) -> UserError | None:
        """Append a token to the text; returns the error, if any."""
        self._left -= 1
        return self._answer and self._answer.advance(token)

    def masks(self, draft: Sequence[int], vocab_size: int) -> np.ndarray:
        """The tokens that may come along a draft; see `GrammarMatcher.masks`."""
        if self._answer:
            masks = self._answer.masks(draft, vocab_size)
        else:
            masks = np.full((len(draft) + 1, -(-vocab_size // 32)), ALL)
        for number in range(min(len(masks), max(0, self._left))):
            others = masks[number].copy()
            for token in self._stop_tokens:
                set_bit(others, token, False)
            if others.any():
                masks[number] = others
            if number < len(draft) and not allows(masks[number], draft[number]):
                return masks[: number + 1]
        return masks
