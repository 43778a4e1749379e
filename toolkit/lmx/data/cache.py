"""The cache between runs, keyed by content. Its folder may be deleted at any time."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..errors import UserError
from ..files.artifacts import ArtifactStore
from ..files.hashes import hash_file, key_of
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


def store(
    warning: Callable[[str], None], ranks: Communicator = SINGLE_PROCESS
) -> ArtifactStore:
    """The artifacts in the cache.

    Args:
        warning: logs that a damaged artifact is made again.
    """
    return ArtifactStore(root(), warning, ranks, "set LMX_CACHE to another folder")


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
    notes, key = store(lambda text: None), key_of(stamp[0])
    known = notes.find("hashes", key)
    if known and known.facts["stamp"] == stamp:
        return known.facts["sha256"]
    digest = hash_file(path)
    if time.time_ns() - changed > SETTLED:
        # Without a note, the next call reads the file again.
        with suppress(UserError):
            facts = {"stamp": stamp, "sha256": digest}
            notes.put("hashes", key, lambda folder: facts)
    return digest
