"""Texts that end an answer, wherever the borders of tokens fall."""

from collections.abc import Sequence


class Stops:
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
