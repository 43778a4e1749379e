"""Sessions by what they have read, so that a known beginning is not read again."""

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import UserError
from ..run.fs import atomic_folder, hash_file
from .kv_cache import CacheState
from .prompt import Messages


class PrefixCache:
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

    def insert(self, tokens: Sequence[int], session: CacheState) -> None:
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

    def fetch(
        self, tokens: Sequence[int], fresh: Callable[[], CacheState]
    ) -> tuple[CacheState, int]:
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
            if session.trim(len(key) - length):
                self._kept.move_to_end(key)
                return session, length
        return fresh(), 0

    def most_recent(
        self, fresh: Callable[[], CacheState]
    ) -> tuple[CacheState, list[int]] | None:
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


# --- from generate.saved: A session in a folder: what a model has read, to go on from another day.


ARRAYS_FILE, METADATA_FILE = "cache.safetensors", "session.json"


def save_prompt_cache(
    session: CacheState,
    folder: Path,
    *,
    digest: str,
    tokens: Sequence[int],
    messages: Messages = (),
) -> None:
    """Write a session and the tokens it has read, whole or not at all.

    Args:
        digest: of the model; no other may go on from here.
        messages: of the chat that was read, to go on with it; see `messages`.
    """
    assert len(tokens) == session.length
    kinds, states = zip(*session.state, strict=True)
    arrays, plain = {}, {}
    for name, value in tree_flatten(list(states)):
        (arrays if isinstance(value, mx.array) else plain)[name] = value
    with atomic_folder(folder) as partial:
        mx.save_safetensors(str(partial / ARRAYS_FILE), arrays)
        facts = {
            "digest": digest,
            "sha256": hash_file(partial / ARRAYS_FILE),
            "kinds": kinds,
            "plain": plain,
            "tokens": [int(token) for token in tokens],
            "messages": list(messages),
        }
        (partial / METADATA_FILE).write_text(json.dumps(facts))


def load_prompt_cache(session: CacheState, folder: Path, *, digest: str) -> list[int]:
    """Bring a session to where a saved one was; the tokens it has read.

    Raises:
        UserError: there is none, it is damaged or another model's.
    """
    place = str(folder)
    try:
        facts = json.loads((folder / METADATA_FILE).read_bytes())
        damaged = hash_file(folder / ARRAYS_FILE) != facts["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"this is no saved session: {error}", place=place) from None
    if damaged:
        raise UserError("this saved session is damaged", place=place)
    if facts["digest"] != digest:
        raise UserError("this saved session is another model's", place=place)
    arrays = mx.load(str(folder / ARRAYS_FILE))
    states = tree_unflatten([*arrays.items(), *facts["plain"].items()])
    state = list(zip(facts["kinds"], states, strict=True))
    session.restore(state, len(facts["tokens"]))
    return facts["tokens"]


def load_messages(folder: Path) -> Messages:
    """The chat of a session that `load` found to be whole; none if it was no chat."""
    return json.loads((folder / METADATA_FILE).read_bytes())["messages"]
