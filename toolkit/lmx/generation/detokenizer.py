"""Streaming detokenization with stop strings."""

from collections.abc import Collection, Sequence
from typing import Any

from .outputs import FinishReason


class StopStringMatcher:
    """Passes text through up to the first stop string.

    Text that may be the beginning of a stop string is held back until it is decided.
    """

    def __init__(self, stop_strings: Sequence[str]):
        assert all(stop_strings), "an empty stop string would end every completion"
        self._stop_strings = tuple(stop_strings)
        self._pending = ""
        self.matched = False
        """Whether a stop string was found; no more text is passed through."""

    def push(self, text: str) -> str:
        """Add text; returns the text that is safe to show."""
        text, self._pending = self._pending + text, ""
        positions = [text.find(stop) for stop in self._stop_strings]
        if matches := [position for position in positions if position >= 0]:
            self.matched = True
            return text[: min(matches)]
        held = (_partial_match(text, stop) for stop in self._stop_strings)
        end = len(text) - max(held, default=0)
        self._pending = text[end:]
        return text[:end]

    def flush(self) -> str:
        """Return the text still held back, at the end of the completion."""
        text, self._pending = self._pending, ""
        return "" if self.matched else text


def _partial_match(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that the text ends with."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)


class StreamingDetokenizer:
    """Turns the tokens of one completion into text and detects its end.

    Args:
        tokenizer: mlx-lm's TokenizerWrapper.
        stop_tokens: tokens that end the completion; they produce no text.
        stop_strings: strings that end the completion; they are not part of the text.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_tokens: Collection[int],
        stop_strings: Sequence[str] = (),
    ):
        self._detokenizer = tokenizer.detokenizer
        self._stop_tokens = stop_tokens
        self._matcher = StopStringMatcher(stop_strings)

    def add(self, token: int, *, last: bool) -> tuple[str, FinishReason | None]:
        """Add a token.

        Args:
            last: whether this is the last token allowed by `max_tokens`.

        Returns:
            The new text, and the finish reason if the completion ends here.
        """
        is_stop = token in self._stop_tokens
        if not is_stop:
            self._detokenizer.add_token(token)
        if is_stop or last:
            self._detokenizer.finalize()
        text = self._matcher.push(self._detokenizer.last_segment)
        if is_stop or last:
            text += self._matcher.flush()
        if is_stop or self._matcher.matched:
            return text, "stop"
        return text, "length" if last else None
