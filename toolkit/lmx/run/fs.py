"""Atomic files and folders, hashes, disk errors, JSON and JSONL.

Intermediate results and cached data are read again by later runs, months later perhaps.
Their folders have an index: the hashes of all files, facts about them, and a key of all
that they depend on. The maker of such a folder reads it with `read_index` and makes it
again if that is None, so that a changed file is never used.
"""

import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..config.text_files import require_regular
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
INDEX = "index.json"
# Smaller files are copied: people edit some of them in place, such as config.json.
MIN_LINKED_BYTES = 1 << 16
# The largest published tokenizer.json has 35 MB.
MAX_JSON_BYTES = 256 << 20
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
                os.fsync(stream.fileno())
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
                _sync(file)
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


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def hash_file(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hash_folder(path: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder, by relative name."""
    files = sorted(p for p in path.rglob("*") if p.is_file())
    return {str(file.relative_to(path)): hash_file(file) for file in files}


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


def parse_json(text: str | bytes, place: Path | str) -> Any:
    """The value of a JSON text.

    Args:
        place: the file, or file and line, that an error names.

    Raises:
        UserError: the text is not JSON.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise UserError("not JSON: nested too deeply", place=str(place)) from error
    except ValueError as error:
        raise UserError(f"not JSON: {error}", place=str(place)) from error


def stored_id(path: Path) -> str:
    """The random identifier in a file, which is written at the first call."""
    if not path.exists():
        write_atomic(path, secrets.token_hex(4))
    return path.read_text()


def read_json(path: Path) -> dict:
    """The object in a JSON file; empty if the file holds another value.

    Raises:
        FileNotFoundError: there is nothing.
        UserError: it is no file, or not JSON.
    """
    require_regular(path, max_bytes=MAX_JSON_BYTES)
    value = parse_json(path.read_bytes(), path)
    return value if isinstance(value, dict) else {}


def object_in(path: Path) -> dict:
    """The object in a JSON file; empty if there is none, or if it is damaged."""
    try:
        return read_json(path) if path.is_file() else {}
    except (OSError, UserError):
        return {}


def read_text(path: Path) -> str:
    """The text of a file, with marks in place of bytes that are not UTF-8.

    Empty if there is no such file.
    """
    return path.read_text("utf-8", errors="replace") if path.is_file() else ""


def read_jsonl(path: Path, **types: type) -> list[dict]:
    """The records of a JSON Lines file; empty if there is no such file.

    Args:
        types: keys of a record, and the type of their values. Other lines are skipped:
            the last line of a killed run may be incomplete.
    """
    return [record for _, record in _records(path, types)]


def filter_jsonl(path: Path, keeps: Callable[[dict], bool]) -> None:
    """Delete the lines that are no record of a stage, or that `keeps` does not keep.

    Raises:
        UserError: a disk error; the file stays as it was.
    """
    lines = (line for line, r in _records(path, {"stage": str}) if keeps(r))
    write_atomic(path, "".join(f"{line}\n" for line in lines))


def _records(path: Path, types: dict[str, type]) -> Iterator[tuple[str, dict]]:
    # Other line breaks, such as U+2028, are part of a text.
    for line in read_text(path).split("\n"):
        with suppress(UserError):
            record = parse_json(line, path)
            if isinstance(record, dict) and all(
                isinstance(record.get(key), kind) for key, kind in types.items()
            ):
                yield line, record


def read_metrics(run_dir: Path, stage: str | None = None) -> list[dict]:
    """The records in metrics.jsonl, oldest first: of a stage, or of all."""
    records = read_jsonl(run_dir / "metrics.jsonl", stage=str, kind=str, step=int)
    return [r for r in records if stage in (None, r["stage"])]


def key_of(facts: object) -> str:
    """A key of a JSON value: 32 hexadecimal digits of its sha256."""
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def write_index(
    folder: Path,
    key: str,
    facts: dict,
    *,
    place: Path | None = None,
    files: dict[str, str] | None = None,
) -> None:
    """Write the index of a folder whose files are complete.

    Args:
        folder: that of `atomic_folder`, so that it is whole or absent.
        key: of what the files depend on, and of their place.
        facts: a JSON object.
        place: of the index; None = in the folder.
        files: what `hash_folder` returns, if it is known.
    """
    files = hash_folder(folder) if files is None else files
    index = {"files": files, "key": key, "facts": facts}
    index["sha256"] = key_of(index)
    write_atomic(place or folder / INDEX, json.dumps(index))


def read_index(
    folder: Path,
    key: str,
    *,
    place: Path | None = None,
    is_deleted: Callable[[str], bool] = lambda _: False,
) -> dict | None:
    """The facts of a folder; None if it is missing, of another key, or if any file was
    changed.

    Hashing reads every file, about 1 GB per second: another model would otherwise be
    trained without a word.

    Args:
        place: of the index; None = in the folder.
        is_deleted: whether its maker deletes a file of this name when it is used up.
            Such a file may be there or not, and is not read.
    """
    index = object_in(place or folder / INDEX)
    digest = index.pop("sha256", None)
    if digest != key_of(index) or index.get("key") != key or folder.is_symlink():
        return None
    try:
        files = (str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        names = {n for n in files if n != INDEX and not is_deleted(n)}
        hashes = {k: v for k, v in index["files"].items() if not is_deleted(k)}
        is_same = names == hashes.keys() and all(
            hash_file(folder / name) == hashes[name] for name in names
        )
    except OSError:
        return None
    return index["facts"] if is_same else None
