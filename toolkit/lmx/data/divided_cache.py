"""Entries of the cache that the processes of a run create together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from ..files.divided_folders import make_folders, unpack
from ..files.hashes import INDEX
from ..files.json_files import read_json
from ..interfaces import Communicator
from .cache import CacheEntry, content_folder, find, get_or_create, key_of

Origin = Literal["made", "made elsewhere", "found"]
"""Where an entry comes from: this process, another one of the run, an earlier run."""


@dataclass
class _Entries:
    """Entries by number, from 0; see `get_or_create_all`."""

    kind: str
    keys: Sequence[str]
    fill: Callable[[int, Path], dict]
    warning: Callable[[str], None]
    space: Callable[[int], int]
    on_entry: Callable[[int, Origin], None]
    ready: dict[int, CacheEntry] = field(default_factory=dict)
    _reported: set[int] = field(default_factory=set)

    def create(self, number: int) -> None:
        entry = self._get_or_create(number, self.fill)
        self.report(number, "made" if entry.made else "found")

    def is_whole(self, number: int) -> bool:
        if number not in self.ready:
            entry = find(self.kind, self.keys[number])
            if entry is None:
                return False
            self.ready[number] = entry
            self.report(number, "found")
        return True

    def receive(self, number: int, data: bytes) -> None:
        def extract(_: int, folder: Path) -> dict:
            unpack(data, folder)
            facts = read_json(folder / INDEX)["facts"]
            (folder / INDEX).unlink()
            return facts

        self._get_or_create(number, extract)
        self.report(number, "found")

    def report(self, number: int, origin: Origin) -> None:
        """Report an entry once."""
        if number not in self._reported:
            self._reported.add(number)
            self.on_entry(number, origin)

    def _get_or_create(self, number: int, fill: Callable) -> CacheEntry:
        self.ready[number] = entry = get_or_create(
            self.kind,
            self.keys[number],
            partial(fill, number),
            warning=self.warning,
            space=self.space(number),
        )
        return entry


def get_or_create_all(
    kind: str,
    keys: Sequence[str],
    fill: Callable[[int, Path], dict],
    *,
    ranks: Communicator,
    warning: Callable[[str], None],
    space: Callable[[int], int] = lambda number: 0,
    on_entry: Callable[[int, Origin], None] = lambda number, origin: None,
) -> list[CacheEntry]:
    """The entries of this kind and these keys; see `get_or_create`.

    Every rank creates its share of those that no machine has. Then all machines have
    all entries.

    Args:
        fill: writes the files of the entry with this number, from 0.
        space: bytes that must be free to create it.
        on_entry: called with the number and the origin of each entry.
    """
    entries = _Entries(kind, keys, fill, warning, space, on_entry)
    if ranks.size == 1:
        # One after the other, so that each is hashed once.
        for number in range(len(keys)):
            entries.create(number)
    else:
        make_folders(
            [content_folder(kind, key) for key in keys],
            ranks,
            key=key_of([kind, *keys]),
            is_whole=entries.is_whole,
            make=entries.create,
            receive=entries.receive,
            made_elsewhere=lambda number: entries.report(number, "made elsewhere"),
        )
    return [entries.ready[number] for number in range(len(keys))]
