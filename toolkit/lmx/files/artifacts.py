"""Folders that are made once: whole or absent, hashed, found by what they depend on.

A process may be killed, or a folder deleted or damaged, at any time: a reader finds an
artifact that is whole, or none. One process of a machine makes it, the others wait.
Processes of a run share the work, and send what a machine lacks.
"""

import fcntl
import json
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import zip_longest
from pathlib import Path
from typing import Literal
from zipfile import ZipFile

from ..errors import UserError
from ..interfaces import SINGLE_PROCESS, Communicator
from .atomic import (
    OTHER_FOLDER,
    atomic_folder,
    disk_errors,
    make_folder,
    remove,
    remove_partial_files,
    require_space,
    write_atomic,
)
from .hashes import hash_file, hash_folder, key_of
from .json_files import object_in, read_json

# In the folder of an artifact: hashes of its files, its kind and key, and its facts.
INDEX = "index.json"

Origin = Literal["made", "made elsewhere", "found"]
"""Who made an artifact: this process, another one of the run, an earlier run."""


@dataclass(frozen=True)
class Artifact:
    """A folder that is whole.

    Attributes:
        facts: a JSON object about its files.
        made: whether this call made it.
    """

    folder: Path
    facts: dict
    made: bool


class ArtifactStore:
    """Artifacts by kind and key, in the folders `<root>/<kind>/<key>/content`.

    A function that makes an artifact writes its files into the empty folder that it
    gets, and returns facts about them, or None.

    Args:
        warning: logs that a damaged artifact is made again.
        ranks: the processes that call the methods for several processes together.
        other_folder: how the user chooses another place, for hints.
    """

    def __init__(
        self,
        root: Path,
        warning: Callable[[str], None] = warnings.warn,
        ranks: Communicator = SINGLE_PROCESS,
        other_folder: str = OTHER_FOLDER,
    ):
        self.root = root
        self.ranks = ranks
        self.warning = warning
        self.other_folder = other_folder

    def folder(self, kind: str, key: str) -> Path:
        """The folder of an artifact, which exists if it was made."""
        return self.root / kind / key / "content"

    def keys(self, kind: str) -> list[str]:
        """The keys of the artifacts of a kind, damaged ones included, in order."""
        places = (self.root / kind).glob("*/content")
        return sorted(place.parent.name for place in places)

    def find(self, kind: str, key: str) -> Artifact | None:
        """The artifact; None if there is none, or if it is damaged."""
        folder = self.folder(kind, key)
        facts = _read_index(folder, f"{kind} {key}")
        return None if facts is None else Artifact(folder, facts, made=False)

    def facts(self, kind: str, key: str) -> dict:
        """The facts of an artifact, unchecked; empty if they are unreadable."""
        facts = object_in(self.folder(kind, key) / INDEX).get("facts")
        return facts if isinstance(facts, dict) else {}

    def find_on_first(self, kind: str, key: str) -> Artifact | None:
        """What `find` returns on rank 0. Other ranks may not see the files.

        All ranks call this, and make a damaged artifact again.
        """
        known, folder = None, self.folder(kind, key)
        if self.ranks.is_first:
            known = self.find(kind, key)
            if known is None and os.path.lexists(folder):
                self.warning(f"{folder}: damaged, made again")
        facts = self.ranks.broadcast_object(known and known.facts)
        if facts is None:
            return None
        return known or Artifact(folder, facts, made=False)

    def get_or_make(
        self,
        kind: str,
        key: str,
        make: Callable[[Path], dict | None],
        *,
        space: int = 0,
    ) -> Artifact:
        """The artifact, which this process makes if there is none.

        Args:
            space: bytes that must be free to make it.

        Raises:
            UserError: the store cannot be written.
        """
        if known := self.find(kind, key):
            return known
        with self._locked(kind, key):
            # Another process may have made it while this one waited.
            if known := self.find(kind, key):
                return known
            folder = self.folder(kind, key)
            if os.path.lexists(folder):
                self.warning(f"{folder}: damaged, made again")
            require_space(folder.parent, space)
            return self._make(kind, key, make)

    def put(self, kind: str, key: str, make: Callable[[Path], dict | None]) -> Artifact:
        """Make an artifact in this process, and replace an older one.

        Raises:
            UserError: the store cannot be written.
        """
        with self._locked(kind, key):
            return self._make(kind, key, make)

    def get_or_make_all(
        self,
        kind: str,
        keys: Sequence[str],
        make: Callable[[int, Path], dict | None],
        *,
        space: Callable[[int], int] = lambda number: 0,
        on_entry: Callable[[int, Origin], None] = lambda number, origin: None,
    ) -> list[Artifact]:
        """The artifacts of these keys. All ranks call this.

        Every rank makes its share of those that no machine has. Then all machines have
        all of them.

        Args:
            make: makes the artifact of this number, from 0.
            space: bytes that must be free to make it.
            on_entry: called once per artifact with its number and origin.

        Raises:
            UserError: the store cannot be written, or a rank has other keys.
        """
        ranks = self.ranks
        ready: dict[int, Artifact] = {}
        reported: set[int] = set()

        def report(number: int, origin: Origin) -> None:
            if number not in reported:
                reported.add(number)
                on_entry(number, origin)

        def get(number: int, make: Callable, space: int = 0) -> None:
            artifact = self.get_or_make(kind, keys[number], make, space=space)
            ready[number] = artifact
            report(number, "made" if artifact.made else "found")

        def numbers_here() -> list[bool]:
            for number, key in enumerate(keys):
                if number not in ready and (known := self.find(kind, key)):
                    ready[number] = known
                    report(number, "found")
            return [number in ready for number in range(len(keys))]

        ranks.require_same(
            key_of([kind, *keys]),
            "prepares other data",
            hint="give all machines the same recipe, data and models",
        )
        held = zip(*ranks.gather_objects(numbers_here()), strict=True)
        missing = [number for number, has in enumerate(held) if not any(has)]
        for start in range(0, len(missing), ranks.size):
            shares = missing[start : start + ranks.size]
            for number in ranks.shard(shares):
                get(number, partial(make, number), space(number))
            for number in shares:
                report(number, "made elsewhere")
        if ranks.size > 1:
            # What another process makes on the same disk need not be sent.
            ranks.wait_for_all()
            self._send_missing(numbers_here(), kind, keys, ready, get)
        return [ready[number] for number in range(len(keys))]

    @contextmanager
    def together(self, kind: str, key: str) -> Iterator[Path]:
        """A new artifact, into whose folder all ranks write different files.

        All ranks enter and leave together, and see the store on one disk.

        Raises:
            UserError: the store cannot be written.
        """
        ranks, folder = self.ranks, self.folder(kind, key)
        with ExitStack() as stack:
            name = None
            if ranks.is_first:
                stack.enter_context(self._locked(kind, key))
                name = stack.enter_context(atomic_folder(folder)).name
            target = folder.parent / ranks.broadcast_object(name)
            with disk_errors(folder):
                yield target
            # Another machine may not list the newest files of this one yet.
            files = [path.name for path in target.iterdir() if path.is_file()]
            listed = ranks.gather_objects(files)
            names = sorted({name for each in listed for name in each})
            own = {name: hash_file(target / name) for name in ranks.shard(names)}
            hashes = ranks.gather_objects(own)
            if ranks.is_first:
                files = {k: v for each in hashes for k, v in each.items()}
                _write_index(target, f"{kind} {key}", {}, files)
        ranks.wait_for_all()

    def remove(self, kind: str, key: str) -> None:
        """Delete an artifact, if there is one."""
        remove(self.root / kind / key)

    def remove_others(self, kind: str, keys: Collection[str] = ()) -> None:
        """Delete the artifacts of a kind whose keys are not among these."""
        for path in (self.root / kind).glob("*"):
            if path.name not in keys:
                remove(path)

    def _make(
        self, kind: str, key: str, make: Callable[[Path], dict | None]
    ) -> Artifact:
        folder = self.folder(kind, key)
        with atomic_folder(folder) as target:
            # Through JSON, so that a new artifact and a found one have the same facts.
            facts = json.loads(json.dumps(make(target) or {}))
            _write_index(target, f"{kind} {key}", facts, hash_folder(target))
        return Artifact(folder, facts, made=True)

    def _send_missing(
        self,
        here: list[bool],
        kind: str,
        keys: Sequence[str],
        ready: dict[int, Artifact],
        get: Callable[[int, Callable], None],
    ) -> None:
        """Send every artifact that a rank lacks, once, to all of them."""
        ranks = self.ranks
        to_send: list[list[int]] = [[] for _ in range(ranks.size)]
        for number, has in enumerate(zip(*ranks.gather_objects(here), strict=True)):
            if not all(has):
                to_send[has.index(True)].append(number)
        for numbers in zip_longest(*to_send):
            own = numbers[ranks.rank]
            data = b"" if own is None else _pack(self.folder(kind, keys[own]))
            received = ranks.gather_bytes(data)
            for number, content in zip(numbers, received, strict=True):
                if number is not None and number not in ready:
                    get(number, partial(_unpack, content))

    @contextmanager
    def _locked(self, kind: str, key: str) -> Iterator[None]:
        """Hold the lock of an artifact; waits while another process makes it."""
        place = self.root / kind / key
        lock = place / "lock"
        with self._hints(place):
            # Links would be followed out of the store.
            for folder in (place.parent, place):
                if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
                    remove(folder)
            make_folder(place)
            if os.path.lexists(lock) and (lock.is_symlink() or not lock.is_file()):
                remove(lock)
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                remove_partial_files(place)
                yield
            finally:
                os.close(handle)

    @contextmanager
    def _hints(self, place: Path) -> Iterator[None]:
        """Errors of the disk say how to choose another place for the store."""
        try:
            with disk_errors(place):
                yield
        except UserError as error:
            if OTHER_FOLDER not in (error.hint or ""):
                raise
            hint = error.hint.replace(OTHER_FOLDER, self.other_folder)
            raise UserError(
                error.message, place=error.place, hint=hint, code=error.code
            ) from error


def _write_index(folder: Path, name: str, facts: dict, files: dict[str, str]) -> None:
    index = {"files": files, "key": name, "facts": facts}
    index["sha256"] = key_of(index)
    write_atomic(folder / INDEX, json.dumps(index))


def _read_index(folder: Path, name: str) -> dict | None:
    """The facts of a folder; None if it is of another name, or if a file was changed.

    Hashing reads every file, about 1 GB per second: another model would otherwise be
    trained without a word.
    """
    index = object_in(folder / INDEX)
    digest = index.pop("sha256", None)
    if digest != key_of(index) or index.get("key") != name or folder.is_symlink():
        return None
    try:
        hashes = hash_folder(folder)
    except OSError:
        return None
    hashes.pop(INDEX)
    return index["facts"] if hashes == index["files"] else None


def _pack(folder: Path) -> bytes:
    stream = BytesIO()
    with ZipFile(stream, "w", strict_timestamps=False) as archive:
        for file in sorted(folder.rglob("*")):
            archive.write(file, file.relative_to(folder))
    return stream.getvalue()


def _unpack(data: bytes, folder: Path) -> dict:
    """Write the files that another rank has packed; returns their facts."""
    with ZipFile(BytesIO(data)) as archive:
        archive.extractall(folder)
    facts = read_json(folder / INDEX)["facts"]
    (folder / INDEX).unlink()
    return facts
