"""Which files of a folder are the data of a split: by its card, or by their names."""

import re
from pathlib import Path

from ..errors import UserError, shorten
from .hub_datasets import card_files
from .readers import SPLITS, SUFFIXES, existing, suffix

WORDS = {word: split for split, words in SPLITS.items() for word in words}
OTHERS, UNREAD = "without a split", "not read"


def list_data_files(path: Path, split: str) -> list[Path]:
    """The data files of a split: `path` itself, or files of the folder `path`.

    Files in whose path a word names a split (train.jsonl, dev/a.jsonl, my_test.jsonl)
    belong to it. Other files are used if none belongs to the split.

    Raises:
        UserError: there is no such file, or a path names two splits.
    """
    if not path.is_dir():
        return [existing(path)]
    files = _by_split(path)
    selected = files.get(split) or files.get(OTHERS)
    if not selected:
        raise UserError(
            f"the folder has no file of the split {split!r}; its files are "
            f"{_text(path, files) or 'none'}",
            hint=f"name a file, or call one {split}.jsonl; "
            f"files end in {', '.join(SUFFIXES)}, .gz allowed",
            place=str(path),
        )
    return [existing(file) for file in selected]


def has_split(path: Path, split: str) -> bool:
    """Whether `path` is a folder with a file of `split`."""
    return path.is_dir() and split in _by_split(path)


def describe(path: Path, split: str) -> str:
    """The files of a folder that are read as `split`, and its other files."""
    if not path.is_dir():
        return ""
    files = _by_split(path)
    return _text(path, {split: files.get(split) or files.pop(OTHERS)} | files)


def splits_in(text: str) -> set[str]:
    """The splits that words of a text name."""
    return {WORDS[w] for w in re.split(r"[^a-z]+", text.lower()) if w in WORDS}


def _by_split(path: Path) -> dict[str, list[Path]]:
    """The files of a folder, except hidden ones: by split, OTHERS or UNREAD."""
    by_card = card_files(path)
    found = {WORDS.get(name, name): files for name, files in by_card.items()}
    known = {file for files in found.values() for file in files}
    for file in sorted(path.rglob("*")):
        name = str(file.relative_to(path))
        is_folder = file.is_dir() and not file.is_symlink()
        if file in known or "/." in f"/{name}" or is_folder:
            continue
        splits = sorted(splits_in(name))
        if by_card or suffix(file) not in SUFFIXES:
            splits = [UNREAD]
        if len(splits) > 1:
            raise UserError(
                f"this path names the splits {' and '.join(splits)}",
                hint="name the files in data.train and data.valid",
                place=str(file),
            )
        found.setdefault(*splits or [OTHERS], []).append(file)
    return found


def _text(path: Path, files: dict[str, list[Path]]) -> str:
    names = ((k, [str(f.relative_to(path)) for f in v]) for k, v in files.items())
    return shorten("; ".join(f"{split}: {', '.join(group)}" for split, group in names))
