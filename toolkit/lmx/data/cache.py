"""The cache between runs, keyed by content. Its folder may be deleted at any time."""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from ..errors import UserError
from ..files.atomic import (
    OTHER_FOLDER,
    atomic_folder,
    disk_errors,
    remove,
    remove_partial_files,
    require_space,
    write_atomic,
)
from ..files.hashes import hash_file, key_of, read_index, write_index
from ..files.json_files import object_in
from ..interfaces import SINGLE_PROCESS, Communicator

# Nanoseconds after which another write of a file certainly changes its time.
SETTLED = 2_000_000_000
# A smaller file is hashed again: a dataset may have thousands, and a note takes longer.
MIN_NOTED_BYTES = 1 << 20


def root() -> Path:
    """LMX_CACHE, else lmx in the user's cache folder.

    Raises:
        UserError: the user has no home folder.
    """
    folder = os.environ.get("LMX_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "lmx"
    )
    path = Path(os.path.expanduser(folder))
    if path.parts[0].startswith("~"):
        raise UserError(
            "the cache has no place: there is no home folder",
            place=folder,
            hint="set LMX_CACHE to a folder",
        )
    return path


def size() -> int:
    """Bytes in the cache."""
    return sum(p.stat().st_size for p in root().rglob("*") if p.is_file())


@dataclass(frozen=True)
class CacheEntry:
    """A folder of the cache.

    Attributes:
        facts: the JSON object that `fill` returned.
        made: whether this call created the entry.
    """

    folder: Path
    facts: dict
    made: bool


def content_folder(kind: str, key: str) -> Path:
    """The folder of an entry, which exists if it was created."""
    return root() / kind / key / "content"


def find(kind: str, key: str) -> CacheEntry | None:
    """The entry of this kind and key; None if there is none, or if it is damaged."""
    folder = content_folder(kind, key)
    facts = read_index(folder, f"{kind} {key}")
    return None if facts is None else CacheEntry(folder, facts, made=False)


def get_or_create(
    kind: str,
    key: str,
    fill: Callable[[Path], dict],
    *,
    warning: Callable[[str], None],
    space: int = 0,
) -> CacheEntry:
    """The entry of this kind and key. One process creates it, others wait.

    Args:
        fill: writes the files into an empty folder and returns facts about them.
        warning: logs that a damaged entry is created again.
        space: bytes that must be free to create the entry.

    Raises:
        UserError: the cache cannot be written.
    """
    if known := find(kind, key):
        return known
    folder = content_folder(kind, key)
    entry = folder.parent
    with _written(entry), _locked(entry):
        # Another process may have created it while this one waited.
        if known := find(kind, key):
            return known
        if folder.exists():
            warning(f"{folder}: damaged, created again")
        remove_partial_files(entry)
        require_space(entry, space)
        with atomic_folder(folder) as partial:
            facts = fill(partial)
            # Through JSON, so that a new entry and a cached one have the same facts.
            facts = json.loads(json.dumps(facts))
            write_index(partial, f"{kind} {key}", facts)
    return CacheEntry(folder, facts, made=True)


def file_hash(path: Path) -> str:
    """Sha256 of a file's content; of a large file noted by path, inode, size and times.

    A program that unpacks or copies a file can set all of them but the ctime.

    Raises:
        OSError: the file cannot be read.
    """
    status = path.stat()
    if status.st_size < MIN_NOTED_BYTES:
        return hash_file(path)
    changed = max(status.st_mtime_ns, status.st_ctime_ns)
    stamp = [str(path.absolute()), status.st_ino, status.st_size, status.st_mtime_ns]
    stamp.append(status.st_ctime_ns)
    note = root() / "hashes" / f"{key_of(stamp[0])}.json"
    known = object_in(note)
    if known.get("stamp") == stamp and isinstance(known.get("sha256"), str):
        return known["sha256"]
    digest = hash_file(path)
    if time.time_ns() - changed > SETTLED:
        # Without a note, the next call reads the file again.
        with suppress(UserError), _written(note):
            if not note.is_file():
                remove(note)
            write_atomic(note, json.dumps({"stamp": stamp, "sha256": digest}))
    return digest


@contextmanager
def locked_folder(
    kind: str, key: str, ranks: Communicator = SINGLE_PROCESS
) -> Iterator[Path]:
    """A folder of the cache whose files the caller checks. Other processes wait.

    Args:
        ranks: enter together. The first one of them on each disk locks the folder.

    Raises:
        UserError: the cache cannot be written.
    """
    entry = root() / kind / key
    owner = ranks.broadcast_object(uuid4().hex)
    with _written(entry), ExitStack() as stack:

        def lock() -> None:
            stack.enter_context(_locked(entry, owner if ranks.size > 1 else ""))
            remove_partial_files(entry)

        ranks.in_turn(lock)
        yield entry / "content"


@contextmanager
def _locked(place: Path, owner: str = "") -> Iterator[None]:
    """Hold the lock of an entry; waits while another process fills it.

    Args:
        owner: the name that processes share, if one of them holds it for all.
    """
    lock = place / "lock"
    # Links would be followed out of the cache.
    for folder in (place.parent, place):
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            remove(folder)
    place.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(lock) and (lock.is_symlink() or not lock.is_file()):
        remove(lock)
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        if not owner or os.pread(handle, len(owner), 0) != owner.encode():
            fcntl.flock(handle, fcntl.LOCK_EX)
            os.pwrite(handle, owner.encode(), 0)
        yield
    finally:
        os.close(handle)


@contextmanager
def _written(place: Path) -> Iterator[None]:
    """Create the cache, and add a hint on LMX_CACHE to errors of its disk."""
    try:
        with disk_errors(place):
            root().mkdir(parents=True, exist_ok=True)
            yield
    except UserError as error:
        if OTHER_FOLDER not in (error.hint or ""):
            raise
        hint = error.hint.replace(OTHER_FOLDER, "set LMX_CACHE to another folder")
        raise UserError(
            error.message,
            place=error.place,
            hint=hint,
            code=error.code,
        ) from error
