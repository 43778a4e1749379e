"""Files that are whole or absent: atomic writes, folders and hashes."""

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import FAILED, UserError

_REASONS = {
    errno.ENOSPC: "no space is left on this disk",
    errno.EDQUOT: "your disk quota is used up",
    errno.EROFS: "this disk is read-only",
    errno.EACCES: "you have no right to write here",
    errno.EPERM: "you have no right to write here",
    errno.EFBIG: "the file would be larger than allowed here",
    errno.ENOTDIR: "a part of this path is a file, not a folder",
}


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn what a disk can refuse into a `UserError`; other faults pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REASONS:
            raise
        raise UserError(
            f"cannot write: {_REASONS[error.errno]}",
            place=str(path),
            hint="free some space or choose another folder with output=...",
            code=FAILED,
        ) from error


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part.

    Raises:
        UserError: the disk refuses; nothing of the new file is left.
    """
    data = content.encode() if isinstance(content, str) else content
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            # mkstemp makes files private; these are for everyone the folder is for.
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
        _sync(path.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to fill that becomes `path` at the end, or nothing on a fault.

    Raises:
        UserError: the disk refuses.
    """
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        try:
            partial.chmod(0o777 & ~_umask())
            yield partial
            for file in partial.rglob("*"):
                _sync(file)
            _replace_folder(partial, path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _sync(path.parent)


def _replace_folder(partial: Path, path: Path) -> None:
    if not path.exists():
        os.rename(partial, path)
        return
    # A folder that is not empty cannot be replaced in one step.
    aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.old."))
    os.rename(path, aside / "it")
    os.rename(partial, path)
    shutil.rmtree(aside)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def hash_file(path: Path) -> str:
    """Sha256 of a file, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hash_folder(path: Path) -> dict[str, str]:
    """Sha256 of every file below a folder, by relative name."""
    files = sorted(p for p in path.rglob("*") if p.is_file())
    return {str(file.relative_to(path)): hash_file(file) for file in files}


def free_bytes(path: Path) -> int:
    """Free space where `path` is or will be."""
    while not path.exists():
        path = path.absolute().parent
    return shutil.disk_usage(path).free


def need_space(path: Path, size: int) -> None:
    """Refuse beforehand what will not fit.

    Raises:
        UserError: fewer than `size` bytes are free there.
    """
    free = free_bytes(path)
    if free < size:
        raise UserError(
            f"{size / 1e6:,.0f} MB are needed here and {free / 1e6:,.0f} MB are free",
            place=str(path),
            hint="free some space or choose another folder with output=...",
            code=FAILED,
        )
