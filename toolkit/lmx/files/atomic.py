"""Files and folders that are whole or absent, and errors of their disk."""

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import BAD_CAST, BAD_PATH, FAILED, UserError

_REASONS = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "the disk quota is exceeded",
    errno.EROFS: "the disk is read-only",
    errno.EACCES: "no write permission",
    errno.EPERM: "no write permission",
    errno.EFBIG: "the file is too large for the disk",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EISDIR: "a folder exists in place of the file",
    errno.ELOOP: "a link exists in place of the file",
    errno.EEXIST: "a file exists in place of the folder",
    errno.ENOLCK: "the disk does not support file locks",
    errno.ENOTSUP: "the disk does not support file locks",
    errno.EOPNOTSUPP: "the disk does not support file locks",
    errno.ENAMETOOLONG: "the name is too long for the disk",
    errno.ENOENT: "the file or its folder does not exist, or was deleted",
    errno.ESTALE: "the server has deleted the folder",
    errno.EIO: "the disk reports an input/output error",
    errno.EMFILE: "too many open files",
    errno.ENFILE: "too many open files",
}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
OTHER_FOLDER = "use another folder with output=..."
FULL_HINT = f"free some space, or {OTHER_FOLDER}"
PARTIAL = ".partial"
# Files of every run directory. Its owner locks the second one.
OWNED = MANIFEST, LOCK = "manifest.json", ".lock"
# Smaller files are copied: people edit some of them in place, such as config.json.
MIN_LINKED_BYTES = 1 << 16
# Device and inode of the run directories of this process.
_held: dict[Path, tuple[int, int]] = {}


def hold(folder: Path) -> None:
    """From now on nothing is written to another folder of this name, or makes it."""
    status = folder.stat()
    _held[folder] = status.st_dev, status.st_ino


def release(folder: Path) -> bool:
    """Hold a folder no longer; returns whether it was still there, or not held."""
    try:
        require_held(folder)
    except OSError:
        return False
    finally:
        _held.pop(folder, None)
    return True


def require_held(path: Path) -> None:
    """Raise FileNotFoundError for a path in a held folder that is gone."""
    for folder, identity in [*_held.items()]:
        if path.is_relative_to(folder):
            status = folder.stat()
            if identity != (status.st_dev, status.st_ino):
                raise FileNotFoundError(errno.ENOENT, "", str(folder))


def make_folder(path: Path) -> None:
    """Create a folder and its parents, except a held one."""
    require_held(path)
    path.mkdir(parents=True, exist_ok=True)


def os_error(error: OSError) -> UserError:
    """An error of the operating system as one sentence."""
    reason = _REASONS.get(error.errno or 0) or error.strerror or str(error)
    hint = "--debug shows the traceback"
    if error.errno == errno.ENOENT and error.filename is None:  # of os.getcwd
        reason, hint = "the working directory was deleted", "change to another one"
    place = None if error.filename is None else os.fsdecode(error.filename)
    return UserError(reason, place=place, hint=hint, code=FAILED)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Convert disk errors to `UserError`; other exceptions pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REASONS:
            raise
        hint = FULL_HINT if error.errno in _FULL else OTHER_FOLDER
        reason, cause = _REASONS[error.errno], error
    except RuntimeError as error:
        if str(error) == BAD_CAST:
            raise UserError(BAD_PATH, place=str(path), hint="rename it") from error
        # MLX reports a failed write without the reason.
        if not str(error).startswith("[write]"):
            raise
        reason = f"MLX failed, with {free_bytes(path) / 1e6:,.0f} MB free"
        hint, cause = FULL_HINT, error
    else:
        return
    message = f"cannot write: {reason}"
    raise UserError(message, place=str(path), hint=hint, code=FAILED) from cause


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file. A reader sees the old or the new content, never a part.

    Raises:
        UserError: a disk error; the old file stays.
    """
    data = content.encode() if isinstance(content, str) else content
    with disk_errors(path):
        partial = _partial_path(path)
        try:
            with partial.open("xb") as stream:
                stream.write(data)
                stream.flush()
                _sync_drive(stream.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        _sync(path.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` at the end.

    After an exception, `path` is unchanged.

    Raises:
        UserError: a disk error.
    """
    with disk_errors(path):
        partial = _partial_path(path)
        partial.mkdir()
        try:
            yield partial
            for file in partial.rglob("*"):
                _sync(file, os.fsync)
            _sync(partial)
            # A non-empty folder cannot be replaced in one step.
            if aside := _partial_path(path) if os.path.lexists(path) else None:
                os.rename(path, aside)
            os.rename(partial, path)
            if aside:
                _delete(aside)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        _sync(path.parent)


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder's content into an existing folder, with links as `copy_file`."""
    # shutil.copytree hides the reason of a disk error.
    for path in source.iterdir():
        if path.is_dir():
            (target / path.name).mkdir(exist_ok=True)
            copy_folder(path, target / path.name)
        else:
            copy_file(path, target / path.name)


def copy_file(source: Path | str, target: Path | str) -> None:
    """Copy a file. Large files of one run directory become hard links.

    Such files share their bytes, so that nothing may write to them in place: see
    `write_atomic` and `atomic_folder`, which replace.
    """
    source, target = Path(source), Path(target)
    target.unlink(missing_ok=True)
    owned = (p for p in target.parents if all((p / n).is_file() for n in OWNED))
    run_dir = next(owned, None)
    is_inside = run_dir and source.resolve().is_relative_to(run_dir.resolve())
    if is_inside and source.stat().st_size >= MIN_LINKED_BYTES:
        # Not all disks have hard links.
        with suppress(OSError):
            os.link(source.resolve(), target)
            return
    shutil.copyfile(source, target)


def remove(path: Path) -> None:
    """Delete a file, a link or a folder, if it exists. No reader sees a part of it."""
    if os.path.lexists(path):
        aside = _partial_path(path)
        os.rename(path, aside)
        _delete(aside)


def old_name(path: Path) -> Path:
    """The first free name `<path>.old-N`."""
    number = 1
    while os.path.lexists(target := path.with_name(f"{path.name}.old-{number}")):
        number += 1
    return target


def remove_partial_files(path: Path) -> None:
    """Remove temporary files and folders of killed writers below a folder."""
    for partial in sorted(path.rglob(f".*{PARTIAL}"), reverse=True):
        _delete(partial)


def _delete(path: Path) -> None:
    """Delete without following links."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def require_own_entries(
    folder: Path,
    kind: str = "run directory",
    *,
    more: Iterable[Path] = (),
    dangling: bool = True,
) -> None:
    """Refuse links that leave a folder, and pipes, sockets and devices in it.

    A write would change another folder, a read could wait for ever, and the target of
    a link would be published.

    Args:
        kind: what the folder is, for messages.
        more: other folders that links may lead to.
        dangling: whether links may have no target, as those of a text editor.

    Raises:
        UserError: naming the entry.
    """
    places = [folder.resolve(), *more]
    for path in folder.rglob("*"):
        # Unlike Path.resolve, this accepts a link to itself.
        target = Path(os.path.realpath(path))
        if path.is_symlink() and not any(map(target.is_relative_to, places)):
            reason = f"this link leaves the {kind}"
        elif path.is_file() or path.is_dir() or (dangling and not path.exists()):
            continue
        elif path.is_symlink():
            reason = "this link has no target"
        else:
            reason = "this is neither a file nor a folder"
        hint = "remove it, or put a copy of the file there"
        raise UserError(reason, place=str(path), hint=hint)


def _partial_path(path: Path) -> Path:
    """A new name on the same disk, which `remove_partial_files` recognizes."""
    make_folder(path.parent)
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")


def _sync(path: Path, sync: Callable[[int], None] | None = None) -> None:
    """Let a file or folder reach the disk; with `os.fsync`, on macOS only its drive."""
    handle = os.open(path, os.O_RDONLY)
    try:
        (sync or _sync_drive)(handle)
    finally:
        os.close(handle)


def _sync_drive(handle: int) -> None:
    """Let a file, and what the drive of a Mac still holds, reach the disk.

    There `fsync` leaves the data in the memory of the drive, which a power cut loses.
    """
    if hasattr(fcntl, "F_FULLFSYNC"):
        # Network disks refuse it.
        with suppress(OSError):
            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
            return
    os.fsync(handle)


def free_bytes(path: Path) -> int:
    """Free bytes on the disk of `path`, which need not exist."""
    while not path.exists():
        path = path.absolute().parent
    return shutil.disk_usage(path).free


def require_space(path: Path, size: int) -> None:
    """Check that `size` bytes are free on the disk of `path`.

    Raises:
        UserError: fewer bytes are free.
    """
    free = free_bytes(path)
    if free < size:
        raise UserError(
            f"this needs {size / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are free",
            place=str(path),
            hint=FULL_HINT,
            code=FAILED,
        )


def stored_id(path: Path) -> str:
    """The random identifier in a file, which is written at the first call."""
    if not path.exists():
        write_atomic(path, secrets.token_hex(4))
    return path.read_text()
