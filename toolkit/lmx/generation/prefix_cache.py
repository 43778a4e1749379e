"""Prefix cache: reuse of processed prompt prefixes, in memory and on disk."""

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import UserError
from ..run.fs import atomic_folder, hash_file
from .kv_cache import CacheState
from .prompt import Messages

ARRAYS_FILE, METADATA_FILE = "cache.safetensors", "metadata.json"


class PrefixCache:
    """Least-recently-used cache states in bounded memory.

    Args:
        max_bytes: total bytes of the stored caches.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self._entries: OrderedDict[tuple[int, ...], tuple[list, int]] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Total bytes of the stored caches."""
        return sum(size for _, size in self._entries.values())

    def insert(self, tokens: Sequence[int], cache: CacheState) -> None:
        """Store a cache that has processed exactly these tokens."""
        assert len(tokens) == cache.length
        size = cache.nbytes
        if not tokens or size > self.max_bytes:
            return
        key = tuple(tokens)
        self._entries[key] = cache.state, size
        self._entries.move_to_end(key)
        while self.nbytes > self.max_bytes:
            self._entries.popitem(last=False)

    def fetch(
        self, tokens: Sequence[int], new_cache: Callable[[], CacheState]
    ) -> tuple[CacheState, int]:
        """A cache that contains the longest stored prefix of the tokens.

        The last token is never included, because its logits are needed.

        Returns:
            The cache, and the number of tokens it has processed.
        """
        lengths = {key: _common_prefix(key, tokens[:-1]) for key in self._entries}
        for key in sorted(lengths, key=lengths.get, reverse=True):
            if not (length := lengths[key]):
                break
            cache = new_cache()
            cache.restore(self._entries[key][0], len(key))
            if cache.trim(len(key) - length):
                self._entries.move_to_end(key)
                return cache, length
        return new_cache(), 0

    def most_recent(
        self, new_cache: Callable[[], CacheState]
    ) -> tuple[CacheState, list[int]] | None:
        """The cache stored last and its tokens; None if the prefix cache is empty."""
        if not self._entries:
            return None
        key = next(reversed(self._entries))
        cache = new_cache()
        cache.restore(self._entries[key][0], len(key))
        return cache, list(key)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)


def require_replaceable(folder: Path) -> None:
    """Refuse a place for a prompt cache that has anything else.

    Raises:
        UserError: naming it.
    """
    if folder.is_dir():
        others = {path.name for path in folder.iterdir()} - {ARRAYS_FILE, METADATA_FILE}
    else:
        others = {folder.name} if os.path.lexists(folder) else set()
    if others:
        raise UserError(
            f"{min(others)} is there, which is no prompt cache",
            place=str(folder),
            hint="name a new folder",
        )


def save_prompt_cache(
    cache: CacheState,
    folder: Path,
    *,
    digest: str,
    tokens: Sequence[int],
    messages: Messages = (),
) -> None:
    """Write a cache and its tokens to a folder, atomically.

    Args:
        digest: hash of the model; only this model can load the cache.
        messages: the chat that was processed; see `load_messages`.

    Raises:
        UserError: the folder has other files.
    """
    require_replaceable(folder)
    assert len(tokens) == cache.length
    kinds, states = zip(*cache.state, strict=True)
    arrays, scalars = {}, {}
    for name, value in tree_flatten(list(states)):
        (arrays if isinstance(value, mx.array) else scalars)[name] = value
    with atomic_folder(folder) as partial:
        mx.save_safetensors(str(partial / ARRAYS_FILE), arrays)
        metadata = {
            "digest": digest,
            "sha256": hash_file(partial / ARRAYS_FILE),
            "kinds": kinds,
            "scalars": scalars,
            "tokens": [int(token) for token in tokens],
            "messages": list(messages),
        }
        (partial / METADATA_FILE).write_text(json.dumps(metadata))


def load_prompt_cache(cache: CacheState, folder: Path, *, digest: str) -> list[int]:
    """Restore a saved prompt cache into `cache`; returns its tokens.

    Raises:
        UserError: the folder holds no prompt cache, a damaged one, or one of another
            model.
    """
    place = str(folder)
    try:
        metadata = json.loads((folder / METADATA_FILE).read_bytes())
        is_damaged = hash_file(folder / ARRAYS_FILE) != metadata["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"not a saved prompt cache: {error}", place=place) from None
    if is_damaged:
        raise UserError("the saved prompt cache is damaged", place=place)
    if metadata["digest"] != digest:
        raise UserError("the saved prompt cache belongs to another model", place=place)
    arrays = mx.load(str(folder / ARRAYS_FILE))
    states = tree_unflatten([*arrays.items(), *metadata["scalars"].items()])
    state = list(zip(metadata["kinds"], states, strict=True))
    cache.restore(state, len(metadata["tokens"]))
    return metadata["tokens"]


def load_messages(folder: Path) -> Messages:
    """The chat of a prompt cache that `load_prompt_cache` accepted; may be empty."""
    return json.loads((folder / METADATA_FILE).read_bytes())["messages"]
