"""Hashes of files, and the index of a folder by which a reader knows its content."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from .atomic import write_atomic
from .json_files import object_in

INDEX = "index.json"


def hash_file(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hash_folder(path: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder, by relative name."""
    files = sorted(p for p in path.rglob("*") if p.is_file())
    return {str(file.relative_to(path)): hash_file(file) for file in files}


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
