"""Texts that end an answer, wherever the borders of tokens fall."""

from collections.abc import Collection, Sequence
from typing import Any

from .outputs import FinishReason


class StopStringMatcher:
    """Lets text through up to the first of some texts.

    What may be the beginning of one is held back until it is decided.
    """

    def __init__(self, stops: Sequence[str]):
        assert all(stops), "an empty text would end every answer"
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False
        """Whether one was met; nothing comes through any more."""

    def push(self, text: str) -> str:
        """What of this and of what was held back may be shown."""
        text, self._held = self._held + text, ""
        places = [text.find(stop) for stop in self._stops]
        if found := [place for place in places if place >= 0]:
            self.hit = True
            return text[: min(found)]
        held = max((self._begun(text, stop) for stop in self._stops), default=0)
        end = len(text) - held
        self._held = text[end:]
        return text[:end]

    def rest(self) -> str:
        """What was held back, when nothing follows."""
        text, self._held = self._held, ""
        return "" if self.hit else text

    @staticmethod
    def _begun(text: str, stop: str) -> int:
        """How much of `stop` the end of the text is."""
        lengths = range(min(len(stop) - 1, len(text)), 0, -1)
        return next((n for n in lengths if text.endswith(stop[:n])), 0)


# --- from generate.spoken: The text of an answer, from tokens as they come.


class StreamingDetokenizer:
    """Turns the tokens of one answer into text, up to where it ends.

    Args:
        tokenizer: mlx-lm's TokenizerWrapper.
        stop_tokens: those that end the answer and have no text.
        stops: texts that end it.
    """

    def __init__(
        self, tokenizer: Any, stop_tokens: Collection[int], stops: Sequence[str] = ()
    ):
        self._detokenizer = tokenizer.detokenizer
        self._end_tokens = stop_tokens
        self._stops = StopStringMatcher(stops)

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
