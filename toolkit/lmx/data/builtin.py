"""Real text that is on every machine, offline: the standard library's own sources."""

import hashlib
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

from ..errors import UserError

SPLITS = ("train", "valid")
VALID_SHARE = 0.04

# Foreign code, tests, data for tests, and a GUI that repeats itself.
SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"),
    *("idlelib", "turtledemo", "pydoc_data", "lib2to3", "ensurepip", "lib-dynload"),
}
MAX_CHARACTERS = 300_000
# A line of a table: it begins with a literal, as in encodings/cp437.py.
_TABLE_LINE = re.compile(r"""^\s*\(?[bu]?(\d|"(?!"")|'(?!'')).*""", re.MULTILINE)
_LINE = re.compile(r"^.*\S.*$", re.MULTILINE)
MAX_TABLE_SHARE = 0.35


def read(name: str, split: str) -> list[tuple[str, str]]:
    """The documents of a built-in corpus as (where, text).

    Args:
        name: a key of `BUILTINS`.
        split: ``train`` or ``valid``; a document is in one of them, by its path alone.

    Raises:
        UserError: there is no such corpus or split, or its text is not here.
    """
    if name not in BUILTINS:
        raise UserError(
            f"there is no built-in corpus {name!r}",
            hint=f"built-in: {', '.join(BUILTINS)}",
            place=f"builtin:{name}",
        )
    if split not in SPLITS:
        raise UserError(
            f"builtin:{name} has no split {split!r}", hint="train and valid exist"
        )
    found = [
        (where, text) for where, text in BUILTINS[name]() if _split(where) == split
    ]
    if not found:
        raise UserError(
            f"builtin:{name} is empty on this machine",
            hint="this Python was installed without its sources; use another Python",
        )
    return found


def _split(where: str) -> str:
    """valid for about 4 paths in a hundred, the same ones on every machine."""
    digest = hashlib.sha256(where.encode()).digest()
    share = int.from_bytes(digest[:4], "big") / 2**32
    return "valid" if share < VALID_SHARE else "train"


def _stdlib() -> tuple[tuple[str, str], ...]:
    return _below(Path(sysconfig.get_paths()["stdlib"]))


# A run asks for every split more than once, and looking at all texts takes a second.
@cache
def _below(root: Path) -> tuple[tuple[str, str], ...]:
    paths = {path.relative_to(root).as_posix(): path for path in _sources(root)}
    texts = ((where, _text(path)) for where, path in sorted(paths.items()))
    return tuple((where, text) for where, text in texts if text and is_prose(text))


def _sources(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def is_prose(text: str) -> bool:
    """Whether a source teaches anything: not empty, not huge, not a table of codes."""
    lines = len(_LINE.findall(text))
    tables = len(_TABLE_LINE.findall(text))
    return 0 < len(text) <= MAX_CHARACTERS and tables <= MAX_TABLE_SHARE * lines


BUILTINS: dict[str, Callable[[], Iterable[tuple[str, str]]]] = {"stdlib": _stdlib}
