"""The text of an answer, from tokens as they come."""

from collections.abc import Collection, Sequence
from typing import Any

from .answers import FinishReason
from .stops import Stops


class Spoken:
    """Turns the tokens of one answer into text, up to where it ends.

    Args:
        tokenizer: mlx-lm's TokenizerWrapper.
        end_tokens: those that end the answer and have no text.
        stops: texts that end it.
    """

    def __init__(
        self, tokenizer: Any, end_tokens: Collection[int], stops: Sequence[str] = ()
    ):
        self._detokenizer = tokenizer.detokenizer
        self._end_tokens = end_tokens
        self._stops = Stops(stops)

    def add(self, token: int, *, last: bool) -> tuple[str, FinishReason | None]:
        """The text that this token completes, and why the answer ends, if it does.

        Args:
            last: whether no more tokens may follow.
        """
        ends = token in self._end_tokens
        if not ends:
            self._detokenizer.add_token(token)
        if ends or last:
            self._detokenizer.finalize()
        text = self._stops.push(self._detokenizer.last_segment)
        if ends or last:
            text += self._stops.rest()
        stopped = ends or self._stops.hit
        return text, "stop" if stopped else "length" if last else None
