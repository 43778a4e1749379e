"""Reads the records of JSONL, JSON, text and Parquet files, each with its location."""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from ..errors import UserError
from . import cache
from .record_formats import Unreadable

SUFFIXES = (".jsonl", ".json", ".txt", ".parquet")
SPLITS = {
    "train": ("train", "training"),
    "valid": ("valid", "validation", "val", "dev"),
    "test": ("test",),
}
END_OF_DOCUMENT = "<|endoftext|>"

# The location of a record, `file:line` or `file[index]`, and the record.
LocatedRecord = tuple[str, object]


def list_data_files(path: Path, split: str) -> list[Path]:
    """The data files of a split: `path` itself, or files of the folder `path`.

    A file named after a split (train.jsonl, val-00000-of-00002.parquet) belongs to that
    split. Files with other names are used if no file is named after the split.

    Raises:
        UserError: there is no such file.
    """
    if not path.is_dir():
        if not path.exists():
            raise _error(path, "there is no such file")
        return [path]
    files = sorted(file for file in path.iterdir() if suffix(file) in SUFFIXES)
    named = [file for file in files if _split(file) == split]
    selected = named or [file for file in files if _split(file) is None]
    if not selected:
        names = ", ".join(file.name for file in files) or "no data files"
        raise UserError(
            f"the folder has no file of the split {split!r}; its files: {names}",
            hint=f"name a file, or call one {split}.jsonl; "
            f"files end in {', '.join(SUFFIXES)}, .gz allowed",
            place=str(path),
        )
    return selected


def has_split(path: Path, split: str) -> bool:
    """Whether `path` is a folder with a file named after `split`."""
    if not path.is_dir():
        return False
    return any(suffix(f) in SUFFIXES and _split(f) == split for f in path.iterdir())


def suffix(path: Path) -> str:
    """The file suffix, without .gz."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def _split(path: Path) -> str | None:
    stem = re.sub(r"-\d+-of-\d+$", "", path.name.split(".")[0].lower())
    return next((name for name, known in SPLITS.items() if stem in known), None)


def read_records(path: Path) -> Iterator[LocatedRecord]:
    """Every record of one file.

    Raises:
        UserError: the file is missing, unreadable, damaged (with its line), or of an
            unsupported type.
    """
    readers = dict(zip(SUFFIXES, (_lines, _list, _documents, _table), strict=True))
    reader = readers.get(suffix(path))
    if reader is None:
        raise _error(path, f"{path.suffix or 'suffixless'} files are not supported")
    try:
        yield from reader(path)
    except UnicodeDecodeError as error:
        raise _error(path, f"is not UTF-8 text: {error}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise _error(path, f"cannot be read: {error}") from None


def content_hash(path: Path) -> str:
    """Sha256 of a file, cached until the file is written again.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        return cache.file_hash(path)
    except OSError as error:
        raise _error(path, f"cannot be read: {error}") from None


def _error(path: Path, message: str, *, at: str = "", hint: str | None = None):
    suffixes = f"data files end in {', '.join(SUFFIXES)}, .gz allowed"
    return UserError(message, place=f"{path}{at}", hint=hint or suffixes)


def _open(path: Path):
    opened = gzip.open if path.suffix == ".gz" else open
    # Only \n ends a line: JSON strings may hold other separators of str.splitlines.
    return opened(path, "rt", encoding="utf-8-sig", newline="\n")


def _lines(path: Path) -> Iterator[LocatedRecord]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                hint = (
                    "a .jsonl file has one JSON object per line; correct or delete it"
                )
                message = f"line {number} is not JSON: {error.msg}"
                raise _error(path, message, at=f":{number}", hint=hint) from None
            except (ValueError, RecursionError):
                # JSON, but with thousands of digits or levels.
                row = Unreadable()
            yield place, row


def _list(path: Path) -> Iterator[LocatedRecord]:
    with _open(path) as file:
        text = file.read()
    hint = "a .json file is one list of objects; one object per line is .jsonl"
    try:
        rows = json.loads(text) if text.strip() else []
    except json.JSONDecodeError as error:
        at = f":{error.lineno}:{error.colno}"
        raise _error(path, f"is not JSON: {error.msg}", at=at, hint=hint) from None
    except (ValueError, RecursionError):
        message = "has a number with too many digits, or too many levels of lists"
        raise _error(path, message, hint=hint) from None
    if not isinstance(rows, list):
        raise _error(path, "is not a list of objects", hint=hint)
    yield from ((f"{path}[{index}]", row) for index, row in enumerate(rows))


def _documents(path: Path) -> Iterator[LocatedRecord]:
    """The file as one document, or as several between lines of END_OF_DOCUMENT."""
    with _open(path) as file:
        start, lines = 1, []
        for number, line in enumerate(file, 1):
            if line.strip() != END_OF_DOCUMENT:
                lines.append(line)
                continue
            yield f"{path}:{start}", {"text": "".join(lines)}
            start, lines = number + 1, []
        if "".join(lines).strip():
            yield f"{path}:{start}", {"text": "".join(lines)}


def _table(path: Path) -> Iterator[LocatedRecord]:
    import pyarrow
    from pyarrow import parquet

    index = 0
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            for batch in parquet.ParquetFile(file).iter_batches():
                for row in batch.to_pylist():
                    yield f"{path}[{index}]", row
                    index += 1
    except pyarrow.ArrowException as error:
        raise _error(path, f"is not a Parquet file: {error}") from None
