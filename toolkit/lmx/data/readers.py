"""Reads the records of data files of all types, each with its location."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from ..config.text_files import open_regular, require_regular
from ..errors import UserError
from . import cache
from .chat.messages import BadRecord, load_json
from .record_formats import UNREADABLE, Unreadable

SUFFIXES = (".jsonl", ".json", ".txt", ".parquet", ".csv", ".tsv")
SPLITS = {
    "train": ("train", "training"),
    "valid": ("valid", "validation", "val", "dev", "eval", "evaluation"),
    "test": ("test", "testing"),
}
END_OF_DOCUMENT = "<|endoftext|>"
# Limits of what is in memory at once: a line, and a JSON list or a document.
MAX_LINE, MAX_WHOLE = 1 << 28, 1 << 30
# A compressed file holds at most SMALL bytes, or MAX_RATIO times its size.
MAX_RATIO, SMALL = 200, 1 << 26
# Few, because a row of a Parquet file may repeat a long text of the file.
PARQUET_ROWS = 256

# The location of a record, `file:line` or `file[index]`, and the record.
LocatedRecord = tuple[str, object]


def existing(path: Path) -> Path:
    """`path`, which must be a file."""
    try:
        require_regular(path)
    except FileNotFoundError:
        raise _error(path, "there is no such file") from None
    except OSError as error:
        raise _error(path, f"cannot be read: {error.strerror}") from None
    return path


def suffix(path: Path) -> str:
    """The file suffix, without .gz."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def read_records(path: Path) -> Iterator[LocatedRecord]:
    """Every record of one file.

    Raises:
        UserError: the file is missing, unreadable, damaged (with its line), or of an
            unsupported type.
    """
    functions = (_lines, _list, _documents, _table, _csv, _csv)
    reader = dict(zip(SUFFIXES, functions, strict=True)).get(suffix(path))
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


class _Decompressed(io.RawIOBase):
    """The content of a gzip file, which ends with an error if there is too much."""

    def __init__(self, path: Path, stream: BinaryIO):
        self._path, self._stream = path, stream
        self._left = max(SMALL, MAX_RATIO * path.stat().st_size)
        self._content = gzip.GzipFile(fileobj=stream)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._content.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            limit = f"{MAX_RATIO} times its size and more than {SMALL >> 20} MiB"
            message = f"the compressed file holds more than {limit}"
            raise _error(self._path, message, hint="decompress it, if you trust it")
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


def _open_bytes(path: Path) -> BinaryIO:
    stream = open_regular(path)
    if path.suffix != ".gz":
        return stream
    return io.BufferedReader(_Decompressed(path, stream), 1 << 16)


def _open(path: Path, newline: str = "\n") -> TextIO:
    # Only \n ends a line: JSON strings may hold other separators of str.splitlines.
    return io.TextIOWrapper(_open_bytes(path), encoding="utf-8-sig", newline=newline)


def _numbered_lines(path: Path, newline: str = "\n") -> Iterator[tuple[int, str]]:
    with _open(path, newline) as file:
        for number in count(1):
            line = file.readline(MAX_LINE + 1)
            if not line:
                return
            if len(line) > MAX_LINE:
                message = f"line {number} has more than {MAX_LINE:,} characters"
                raise _error(path, message, at=f":{number}", hint="split it")
            yield number, line


def _lines(path: Path) -> Iterator[LocatedRecord]:
    hint = "a .jsonl file has one JSON object per line; correct or delete it"
    for number, line in _numbered_lines(path):
        if not line.strip():
            continue
        try:
            row = load_json(line)
        except json.JSONDecodeError as error:
            message = f"line {number} is not JSON: {error.msg}"
            raise _error(path, message, at=f":{number}", hint=hint) from None
        except BadRecord as error:
            row = Unreadable(str(error))
        except (ValueError, RecursionError):
            row = UNREADABLE
        yield f"{path}:{number}", row


def _list(path: Path) -> Iterator[LocatedRecord]:
    hint = "a .json file is one list of objects; one object per line is .jsonl"
    with _open(path) as file:
        text = file.read(MAX_WHOLE + 1)
    if len(text) > MAX_WHOLE:
        message = f"a .json file has at most {MAX_WHOLE:,} characters"
        raise _error(path, message, hint=hint)
    try:
        rows = load_json(text) if text.strip() else []
    except json.JSONDecodeError as error:
        at = f":{error.lineno}:{error.colno}"
        raise _error(path, f"is not JSON: {error.msg}", at=at, hint=hint) from None
    except BadRecord as error:
        raise _error(path, str(error)) from None
    except (ValueError, RecursionError):
        raise _error(path, f"has {UNREADABLE.reason}", hint=hint) from None
    if not isinstance(rows, list):
        raise _error(path, "is not a list of objects", hint=hint)
    yield from ((f"{path}[{index}]", row) for index, row in enumerate(rows))


def _documents(path: Path) -> Iterator[LocatedRecord]:
    """The file as one document, or as several between lines of END_OF_DOCUMENT."""
    start, size, lines = 1, 0, []
    for number, line in _numbered_lines(path):
        if line.strip() == END_OF_DOCUMENT:
            yield f"{path}:{start}", {"text": "".join(lines)}
            start, size, lines = number + 1, 0, []
            continue
        lines.append(line.replace("\r\n", "\n"))
        size += len(line)
        if size > MAX_WHOLE:
            message = f"a document has at most {MAX_WHOLE:,} characters"
            hint = f"a line {END_OF_DOCUMENT} ends a document"
            raise _error(path, message, at=f":{start}", hint=hint)
    if "".join(lines).strip():
        yield f"{path}:{start}", {"text": "".join(lines)}


def _csv(path: Path) -> Iterator[LocatedRecord]:
    """The rows below a header. All values are text, as they stand in the file."""
    hint = 'a value with the separator, a quote or a line break stands in "..."'
    # The reader splits lines itself, because some line ends are in values.
    lines = (line for _, line in _numbered_lines(path, newline=""))
    header = next(lines, "")
    delimiter = "\t" if suffix(path) == ".tsv" else ","
    if delimiter not in header and ";" in header:
        # Spreadsheets write it where the comma is the decimal point.
        delimiter = ";"
    # Of a value, for all readers of the process.
    csv.field_size_limit(MAX_LINE)
    rows = csv.reader(chain([header], lines), delimiter=delimiter, strict=True)
    end = 0
    try:
        # pandas gives its index no name.
        names = [name or f"column {n}" for n, name in enumerate(next(rows, []), 1)]
        if len({*names}) < len(names):
            raise csv.Error("the header has a name twice")
        end = rows.line_num
        for row in rows:
            if len(row) == len(names):
                yield f"{path}:{end + 1}", dict(zip(names, row, strict=True))
            elif row:
                count = f"{len(row)} values, and the header {len(names)}"
                raise csv.Error(f"the row has {count}")
            end = rows.line_num
    except csv.Error as error:
        raise _error(path, str(error), at=f":{end + 1}", hint=hint) from None


def _table(path: Path) -> Iterator[LocatedRecord]:
    import pyarrow
    from pyarrow import parquet

    index = 0
    try:
        with _open_bytes(path) as file:
            source = io.BytesIO(file.read()) if path.suffix == ".gz" else file
            table = parquet.ParquetFile(source)
            groups = range(table.metadata.num_row_groups)
            size = sum(table.metadata.row_group(n).total_byte_size for n in groups)
            if size > max(SMALL, MAX_RATIO * path.stat().st_size):
                raise _error(path, f"holds more than {MAX_RATIO} times its size")
            for batch in table.iter_batches(batch_size=PARQUET_ROWS):
                for row in batch.to_pylist():
                    yield f"{path}[{index}]", without_nulls(row)
                    index += 1
    # ArrowInvalid is a ValueError too; damaged files give several kinds.
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise _error(path, f"is not a Parquet file: {error}") from None


def without_nulls(row: dict) -> dict:
    """A row of Arrow without the keys of objects that only other rows have."""
    return {key: _without_nulls(value) for key, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value
