"""Built-in datasets of text that every machine has: Python's standard library."""

import hashlib
import os
import re
import sysconfig
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

from ..errors import UserError

# The start of the name of a built-in dataset in a recipe.
PREFIX = "builtin:"
SPLITS = ("train", "valid")
VALID_SHARE = 0.04

# Third-party code, tests and their data, and repetitive GUI code.
SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"),
    *("idlelib", "turtledemo", "pydoc_data", "lib2to3", "ensurepip", "lib-dynload"),
}
MAX_CHARACTERS = 300_000
# A line that begins with a literal belongs to a table, as in encodings/cp437.py.
_TABLE_LINE = re.compile(r"""^\s*\(?[bu]?(\d|"(?!"")|'(?!'')).*""", re.MULTILINE)
_LINE = re.compile(r"^.*\S.*$", re.MULTILINE)
MAX_TABLE_SHARE = 0.35


def read(name: str, split: str) -> list[tuple[str, str]]:
    """The documents of a built-in dataset as (where, text).

    Args:
        name: a key of `BUILTINS`.
        split: ``train`` or ``valid``; the path of a document decides its split.

    Raises:
        UserError: there is no such dataset or split, or Python has no source files.
    """
    if name not in BUILTINS:
        raise UserError(
            f"there is no built-in dataset {name!r}",
            hint=f"built-in datasets: {', '.join(BUILTINS)}",
            place=f"builtin:{name}",
        )
    if split not in SPLITS:
        raise UserError(
            f"builtin:{name} has no split {split!r}",
            hint="its splits are train and valid",
        )
    documents = []
    for where, text in BUILTINS[name]():
        # The same paths on every machine are for validation.
        number = int.from_bytes(hashlib.sha256(where.encode()).digest()[:4], "big")
        if (number / 2**32 < VALID_SHARE) == (split == "valid"):
            documents.append((where, text))
    if not documents:
        raise UserError(
            f"builtin:{name} is empty on this machine",
            hint="this Python was installed without its source files; use another one",
        )
    return documents


# A run reads every split more than once, and filtering the texts takes a second.
@cache
def _documents(root: Path) -> tuple[tuple[str, str], ...]:
    documents = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        for path in (Path(folder, name) for name in files if name.endswith(".py")):
            with suppress(UnicodeDecodeError):
                if is_prose(text := path.read_text(encoding="utf-8")):
                    documents.append((path.relative_to(root).as_posix(), text))
    return tuple(sorted(documents))


def is_prose(text: str) -> bool:
    """Whether a source file is useful text: not empty, not huge, not a table."""
    lines = len(_LINE.findall(text))
    tables = len(_TABLE_LINE.findall(text))
    return 0 < len(text) <= MAX_CHARACTERS and tables <= MAX_TABLE_SHARE * lines


BUILTINS: dict[str, Callable[[], Iterable[tuple[str, str]]]] = {
    "stdlib": lambda: _documents(Path(sysconfig.get_paths()["stdlib"]))
}
