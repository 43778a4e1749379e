"""An index of a folder's files: a changed file is noticed, and never used.

Intermediate results and cached data are read again by later runs, months later perhaps.
Their folders have an index: the hashes of all files, facts about them, and a key of all
that they depend on. The maker of such a folder reads it with `read_index` and makes it
again if that is None.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from . import fs

INDEX = "index.json"


def key_of(facts: object) -> str:
    """A key of a JSON value: 32 hexadecimal digits of its sha256."""
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def write_index(
    folder: Path, key: str, facts: dict, *, place: Path | None = None
) -> None:
    """Write the index of a folder whose files are complete.

    Args:
        folder: that of `fs.atomic_folder`, so that it is whole or absent.
        key: of what the files depend on, and of their place.
        facts: a JSON object.
        place: of the index; None = in the folder.
    """
    index = {"files": fs.hash_folder(folder), "key": key, "facts": facts}
    index["sha256"] = key_of(index)
    fs.write_atomic(place or folder / INDEX, json.dumps(index))


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
    index = fs.object_in(place or folder / INDEX)
    digest = index.pop("sha256", None)
    if digest != key_of(index) or index.get("key") != key or folder.is_symlink():
        return None
    try:
        paths = {str(p.relative_to(folder)): p for p in _files_below(folder)}
        paths = {k: p for k, p in paths.items() if k != INDEX and not is_deleted(k)}
        hashes = {k: v for k, v in index["files"].items() if not is_deleted(k)}
        is_same = paths.keys() == hashes.keys() and all(
            fs.hash_file(path) == hashes[name] for name, path in paths.items()
        )
    except OSError:
        return None
    return index["facts"] if is_same else None


def _files_below(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
