"""Files that are whole or absent: atomic writes, folders and hashes."""

import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
    errno.EEXIST: "a file is in the way of a folder",
    errno.ENOLCK: "files cannot be locked on this disk",
    errno.ENOTSUP: "files cannot be locked on this disk",
    errno.ENAMETOOLONG: "the name is too long for this disk",
}
HINT = "free some space or choose another folder with output=..."
PARTIAL = ".partial"


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn what a disk can refuse into a `UserError`; other faults pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REASONS:
            raise
        raise _refused(path, _REASONS[error.errno]) from error
    except RuntimeError as error:
        # MLX's writers fail with this and do not say why.
        if not str(error).startswith("[write]"):
            raise
        reason = f"the disk refused, with {free_bytes(path) / 1e6:,.0f} MB free"
        raise _refused(path, reason) from error


def _refused(path: Path, reason: str) -> UserError:
    return UserError(f"cannot write: {reason}", place=str(path), hint=HINT, code=FAILED)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part.

    Raises:
        UserError: the disk refuses; nothing of the new file is left.
    """
    data = content.encode() if isinstance(content, str) else content
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = _beside(path)
        try:
            with partial.open("xb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        _sync(path.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to fill that becomes `path` at the end, or nothing on a fault.

    Raises:
        UserError: the disk refuses.
    """
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = _beside(path)
        partial.mkdir()
        try:
            yield partial
            for file in partial.rglob("*"):
                _sync(file)
            _replace_folder(partial, path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        _sync(path.parent)


def remove_folder(path: Path) -> None:
    """Delete a folder, if it is there, so that no reader sees a part of it."""
    if path.exists():
        aside = _beside(path)
        os.rename(path, aside)
        shutil.rmtree(aside)


def sweep(path: Path) -> None:
    """Remove what writers that were killed left half-written below a folder of ours."""
    for partial in sorted(path.rglob(f".*{PARTIAL}"), reverse=True):
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink()


def _replace_folder(partial: Path, path: Path) -> None:
    if not path.exists():
        os.rename(partial, path)
        return
    # A folder that is not empty cannot be replaced in one step.
    aside = _beside(path)
    os.rename(path, aside)
    os.rename(partial, path)
    shutil.rmtree(aside)


def _beside(path: Path) -> Path:
    """A new name on the same disk, by which `sweep` knows what was never finished."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
            hint=HINT,
            code=FAILED,
        )


def read_json(path: Path) -> dict:
    """The object in a JSON file; empty if the file holds another value.

    Raises:
        UserError: the file is not JSON.
    """
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"this is not JSON: {error}", place=str(path)) from error
    return value if isinstance(value, dict) else {}


def read_jsonl(path: Path) -> list[dict]:
    """All records of a JSONL file; empty if the file does not exist."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        # The last line of a killed run may be incomplete.
        with suppress(ValueError):
            records.append(json.loads(line))
    return records


def stage_metrics(run_dir: Path, stage: str) -> list[dict]:
    """The records of a stage in metrics.jsonl, oldest first."""
    records = read_jsonl(run_dir / "metrics.jsonl")
    return [record for record in records if record["stage"] == stage]
