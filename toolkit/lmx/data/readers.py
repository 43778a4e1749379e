"""Records out of JSONL, JSON, text and Parquet files, each with its place."""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from ..errors import UserError
from . import cache

SUFFIXES = (".jsonl", ".json", ".txt", ".parquet")
SPLITS = {
    "train": ("train", "training"),
    "valid": ("valid", "validation", "val", "dev"),
    "test": ("test",),
}
END_OF_DOCUMENT = "<|endoftext|>"

# A record and its place, `file:line` or `file[index]`.
LocatedRecord = tuple[str, object]


def list_data_files(path: Path, split: str) -> list[Path]:
    """The data files at `path`: itself, or those of a folder that hold `split`.

    Files named after a split (train.jsonl, val-00000-of-00002.parquet) hold that one;
    files with other names hold whatever is asked for where none is named after it.
    """
    if not path.is_dir():
        if not path.exists():
            raise _fault(path, "there is no such file")
        return [path]
    files = sorted(file for file in path.iterdir() if suffix(file) in SUFFIXES)
    named = [file for file in files if _split(file) == split]
    found = named or [file for file in files if _split(file) is None]
    if not found:
        names = ", ".join(file.name for file in files) or "no data file"
        raise UserError(
            f"no file of the split {split!r} in this folder; it holds {names}",
            hint=f"name a file, or call one {split}.jsonl; "
            f"files end in {', '.join(SUFFIXES)}, .gz allowed",
            place=str(path),
        )
    return found


def has_split(path: Path, split: str) -> bool:
    """Whether `path` is a folder with a file named after `split`."""
    if not path.is_dir():
        return False
    return any(suffix(f) in SUFFIXES and _split(f) == split for f in path.iterdir())


def suffix(path: Path) -> str:
    """The kind of file, without .gz."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def _split(path: Path) -> str | None:
    stem = re.sub(r"-\d+-of-\d+$", "", path.name.split(".")[0].lower())
    return next((name for name, known in SPLITS.items() if stem in known), None)


def read_records(path: Path) -> Iterator[LocatedRecord]:
    """Every record of one file.

    Raises:
        UserError: the file is missing, unreadable, damaged (with its line), or of a
            kind we do not read.
    """
    readers = dict(zip(SUFFIXES, (_lines, _list, _documents, _table), strict=True))
    reader = readers.get(suffix(path))
    if reader is None:
        raise _fault(
            path, f"cannot read {path.suffix or 'a file without suffix'} files"
        )
    try:
        yield from reader(path)
    except UnicodeDecodeError as error:
        raise _fault(path, f"is not UTF-8 text: {error}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise _fault(path, f"cannot be read: {error}") from None


def content_hash(path: Path) -> str:
    """Sha256 of a file, remembered as long as the file is not written again.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return cache.file_hash(path)
    except OSError as error:
        raise _fault(path, f"cannot be read: {error}") from None


def _fault(path: Path, message: str, *, at: str = "", hint: str | None = None):
    kinds = f"data files end in {', '.join(SUFFIXES)}, .gz allowed"
    return UserError(message, place=f"{path}{at}", hint=hint or kinds)


def _open(path: Path):
    opened = gzip.open if path.suffix == ".gz" else open
    # Only \n ends a line: JSON text may hold the separators of str.splitlines.
    return opened(path, "rt", encoding="utf-8-sig", newline="\n")


def _lines(path: Path) -> Iterator[LocatedRecord]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield f"{path}:{number}", json.loads(line)
            except json.JSONDecodeError as error:
                hint = "a .jsonl file has one JSON object per line; mend or delete it"
                broken = f"line {number} is not JSON: {error.msg}"
                raise _fault(path, broken, at=f":{number}", hint=hint) from None


def _list(path: Path) -> Iterator[LocatedRecord]:
    with _open(path) as file:
        text = file.read()
    hint = "a .json file is one list of objects; one object per line is .jsonl"
    try:
        rows = json.loads(text) if text.strip() else []
    except json.JSONDecodeError as error:
        at = f":{error.lineno}:{error.colno}"
        raise _fault(path, f"is not JSON: {error.msg}", at=at, hint=hint) from None
    if not isinstance(rows, list):
        raise _fault(path, "is not a list of objects", hint=hint)
    yield from ((f"{path}[{index}]", row) for index, row in enumerate(rows))


def _documents(path: Path) -> Iterator[LocatedRecord]:
    """The file as one document, or as several between lines of END_OF_DOCUMENT."""
    with _open(path) as file:
        start, held = 1, []
        for number, line in enumerate(file, 1):
            if line.strip() != END_OF_DOCUMENT:
                held.append(line)
                continue
            yield f"{path}:{start}", {"text": "".join(held)}
            start, held = number + 1, []
        if "".join(held).strip():
            yield f"{path}:{start}", {"text": "".join(held)}


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
        raise _fault(path, f"is not a Parquet file: {error}") from None
