"""Sessions by what they have read, so that a known beginning is not read again."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from .session import Session


class Prefixes:
    """The sessions used last, in bounded memory.

    Args:
        limit: bytes of caches in all; the least recently used ones go first.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._kept: OrderedDict[tuple[int, ...], tuple[list, int]] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(size for _, size in self._kept.values())

    def keep(self, tokens: Sequence[int], session: Session) -> None:
        """Remember a session that has read exactly these tokens."""
        assert len(tokens) == session.length
        size = session.nbytes
        if not tokens or size > self.limit:
            return
        key = tuple(tokens)
        self._kept[key] = session.state, size
        self._kept.move_to_end(key)
        while self.nbytes > self.limit:
            self._kept.popitem(last=False)

    def resume(
        self, tokens: Sequence[int], fresh: Callable[[], Session]
    ) -> tuple[Session, int]:
        """A session as far along these tokens as what is kept allows.

        The last token stays to be read, for its logits are wanted.

        Returns:
            The session, and how many of the tokens it has read.
        """
        common = {key: _common(key, tokens[:-1]) for key in self._kept}
        for key in sorted(common, key=common.get, reverse=True):
            if not (length := common[key]):
                break
            session = fresh()
            session.restore(self._kept[key][0], len(key))
            if session.forget(len(key) - length):
                self._kept.move_to_end(key)
                return session, length
        return fresh(), 0

    def newest(self, fresh: Callable[[], Session]) -> tuple[Session, list[int]] | None:
        """The session kept last and the tokens it has read; None = nothing is kept."""
        if not self._kept:
            return None
        key = next(reversed(self._kept))
        session = fresh()
        session.restore(self._kept[key][0], len(key))
        return session, list(key)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length)
