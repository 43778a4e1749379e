"""Prefix cache: reuse of processed prompt prefixes, in memory and on disk."""

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import mlx.core as mx
from annotated_types import Len
from mlx.utils import tree_flatten, tree_unflatten
from pydantic import BaseModel, ConfigDict, NonNegativeInt

from ...errors import UserError, error_detail, library_errors
from ...models.safetensors_io import read_header
from ...run.fs import atomic_folder, hash_file, read_json
from ..prompt import Messages
from .sequence import CacheState

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


class SavedPrompt(BaseModel):
    """What a prompt cache says of itself, besides its arrays.

    Attributes:
        digest: hash of the model; only this model can load the cache.
        kinds: the class of every layer cache.
        scalars: values of the cache state that are no arrays.
        tokens: that the cache has processed.
        messages: the chat that was processed; may be empty.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    digest: str
    arrays_sha256: str
    kinds: list[str]
    scalars: dict[str, int | None]
    tokens: list[NonNegativeInt]
    messages: list[Annotated[dict[Literal["role", "content"], str], Len(2)]]

    @property
    def sha256(self) -> str:
        """Hash of all of it, and so of the arrays too."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


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
        digest, messages: see `SavedPrompt`.

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
        saved = SavedPrompt(
            digest=digest,
            arrays_sha256=hash_file(partial / ARRAYS_FILE),
            kinds=[*kinds],
            scalars=scalars,
            tokens=[int(token) for token in tokens],
            messages=[*messages],
        )
        content = {"sha256": saved.sha256, "prompt": saved.model_dump()}
        (partial / METADATA_FILE).write_text(json.dumps(content))


def load_prompt_cache(cache: CacheState, folder: Path, *, digest: str) -> SavedPrompt:
    """Restore a saved prompt cache into `cache`.

    Raises:
        UserError: the folder holds no prompt cache, a damaged one, or one of another
            model.
    """
    place = str(folder)
    try:
        content = read_json(folder / METADATA_FILE)
        saved = SavedPrompt.model_validate(content.get("prompt"))
        read_header(folder / ARRAYS_FILE)
        hashes = saved.sha256, hash_file(folder / ARRAYS_FILE)
    except (OSError, ValueError) as error:
        detail = error_detail(error)
        raise UserError(f"not a saved prompt cache: {detail}", place=place) from None
    damaged = "the saved prompt cache is damaged"
    if hashes != (content.get("sha256"), saved.arrays_sha256):
        raise UserError(damaged, place=place)
    if saved.digest != digest:
        raise UserError("the saved prompt cache belongs to another model", place=place)
    with library_errors(damaged, place=place):
        arrays = mx.load(str(folder / ARRAYS_FILE))
        states = tree_unflatten([*arrays.items(), *saved.scalars.items()])
        state = list(zip(saved.kinds, states, strict=True))
        cache.restore(state, len(saved.tokens))
        # Only the shapes are checked; nothing is computed.
        cache.model(mx.zeros((1, 1), mx.int32), cache=cache.caches)
        cache.restore(state, len(saved.tokens))
    return saved
