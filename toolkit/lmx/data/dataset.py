"""Rows out of any source, their format found from many of them, bad ones named."""

import hashlib
import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from ..errors import UserError
from . import builtin, readers, record_formats
from .record_formats import DataRecord

LOOKED_AT = 200
NAMED = 5
BUILTIN = "builtin:"
# Where a relative path of the recipe lies; None = nowhere here.
Find = Callable[[str], Path | None]
_NO_COLUMNS: Mapping[str, str] = MappingProxyType({})

__all__ = [
    "ReadStats",
    "DataRecord",
    "RecordReader",
    "has_split",
    "source_fingerprint",
    "source_size",
]


@dataclass(frozen=True)
class ReadStats:
    """What one pass over a source gave.

    Attributes:
        format: chat, preference, completion, instruction or text.
        rows: how many could be used.
        bad: how many were skipped.
        named: (where, reason) of the first few of those.
    """

    source: str
    format: str
    rows: int
    bad: int
    named: tuple[tuple[str, str], ...]


class RecordReader:
    """The rows of one source, read anew record by record by every iteration.

    Args:
        source: builtin:<name>, a file or folder, or a Hub data set (see
            `hub_id`).
        split: train, valid or test.
        find: where a relative path of the recipe lies.
        columns: our name of a column -> theirs.
        streaming: read a Hub data set without downloading it whole.
        limit: records to read at most.

    Attributes:
        format: of most of the first records; records of another are skipped as bad.
        tally: what the last whole iteration gave; None before it.

    Raises:
        UserError: the source is missing, damaged (with its line), empty, or its format
            is unknown; from an iteration, also that no row can be used.
    """

    def __init__(
        self,
        source: str,
        *,
        split: str = "train",
        find: Find = Path,
        columns: Mapping[str, str] = _NO_COLUMNS,
        streaming: bool = False,
        limit: int | None = None,
    ):
        record_formats.check_columns(dict(columns))
        self.source = source
        self.stats: ReadStats | None = None
        self._columns = dict(columns)
        self._limit = limit
        self._open = _opened(source, split, find, streaming)
        first = [record for _, record in islice(self._records(), LOOKED_AT)]
        if not first:
            raise UserError("there are no rows here; the source is empty", place=source)
        found = Counter(map(record_formats.format_of, first))
        del found[None]
        if not found:
            raise _no_format(source, first[0], self._columns)
        self.format = found.most_common(1)[0][0]

    def __iter__(self) -> Iterator[DataRecord]:
        good, bad, named, keys = 0, 0, [], "none"
        for where, record in self._records():
            try:
                row = _row(where, record, self.format)
            except record_formats.BadRecord as error:
                bad += 1
                if bad <= NAMED:
                    named.append((where, str(error)))
                if bad == 1 and isinstance(record, dict):
                    keys = ", ".join(record)
                continue
            good += 1
            yield row
        if not good:
            raise _all_bad(self.source, self.format, bad, named[0], keys)
        self.stats = ReadStats(self.source, self.format, good, bad, tuple(named))

    def _records(self) -> Iterator[readers.LocatedRecord]:
        for where, record in islice(self._open(), self._limit):
            yield where, record_formats.apply_columns(record, self._columns)


def has_split(source: str, split: str, *, find: Find = Path) -> bool:
    """Whether `source` itself names rows of `split`; a single file names none."""
    if source.startswith(BUILTIN):
        return split in builtin.SPLITS
    if hub_id(source, find):
        return _hub(source, split)[1] is not None
    return readers.has_split(find(source) or Path(source), split)


def hub_id(source: str, find: Find = Path) -> tuple[str, str | None] | None:
    """Name and revision of a data set of the Hub; None of a source of another kind.

    It is `name`, `owner/name` or `owner/name@revision`, and nothing here is called so.
    """
    name, _, revision = source.partition("@")
    path = find(source) or Path(source)
    if source.startswith(BUILTIN) or path.exists() or not _is_hub_name(name):
        return None
    return name, revision or None


def source_fingerprint(source: str, split: str, *, find: Find = Path) -> list:
    """What changes when the content of `source` does, without parsing it.

    Raises:
        UserError: the source is missing or cannot be read.
    """
    if source.startswith(BUILTIN):
        text = json.dumps(builtin.read(source.removeprefix(BUILTIN), split))
        return [source, hashlib.sha256(text.encode()).hexdigest()]
    if hub_id(source, find):
        builder, name = _hub(source, split)
        return [source, name, builder.hash, builder.config_id]
    path = find(source) or Path(source)
    return [
        [str(p), readers.content_hash(p)] for p in readers.list_data_files(path, split)
    ]


def source_size(source: str, split: str, *, find: Find = Path) -> int:
    """Bytes of the files of a local source; 0 for others, whose size is not known."""
    path = find(source) or Path(source)
    if source.startswith(BUILTIN) or not path.exists():
        return 0
    return sum(file.stat().st_size for file in readers.list_data_files(path, split))


def _opened(source: str, split: str, find: Find, streaming: bool):
    """A function that reads the source from its beginning whenever it is called."""
    if source.startswith(BUILTIN):
        documents = builtin.read(source.removeprefix(BUILTIN), split)
        return lambda: ((f"{source}/{where}", {"text": t}) for where, t in documents)
    if hub_id(source, find):
        return _hub_opened(source, split, streaming)
    found = readers.list_data_files(find(source) or Path(source), split)
    return lambda: (placed for file in found for placed in readers.read_records(file))


def _row(where: str, record: object, name: str) -> DataRecord:
    if record_formats.format_of(record) != name:
        keys = ", ".join(record) if isinstance(record, dict) else "no object"
        raise record_formats.BadRecord(f"not {name}: it holds {keys or 'no keys'}")
    skill = record.get("skill")
    fields = record_formats.FORMATS[name].parse(record)
    return DataRecord(where, **fields, skill=skill if isinstance(skill, str) else None)


def _no_format(source: str, record: object, columns: Mapping[str, str]) -> UserError:
    if not isinstance(record, dict):
        return UserError(
            f"the rows are not objects with keys; the first is {str(record)[:60]!r}",
            hint='one row looks like {"prompt": "...", "completion": "..."}',
            place=source,
        )
    keys = list(record)
    missing = [their for their in columns.values() if their not in keys]
    absent = f"; columns names {', '.join(missing)}, not there" if missing else ""
    name, renaming = record_formats.nearest(keys)
    pairs = ", ".join(f"{our}: {their}" for our, their in renaming.items())
    return UserError(
        f"no format fits; the keys found are {', '.join(keys) or 'none'}{absent}",
        hint=f"nearest is {name} ({', '.join(renaming)}); say which column is which:\n"
        f"data:\n  columns: {{{pairs}}}",
        place=source,
    )


def _all_bad(source: str, name: str, bad: int, first, keys: str) -> UserError:
    where, reason = first
    return UserError(
        f"no row can be used; all {bad} are bad as {name}, the first because "
        f"{reason} ({where}); keys found: {keys}",
        hint=f"a {name} row needs {' and '.join(record_formats.FORMATS[name].keys)}",
        place=source,
    )


def _is_hub_name(name: str) -> bool:
    """name or owner/name; what ends as a file does is a file, there or not."""
    parts = name.split("/")
    plain = all(part and part.strip(".~") and "\\" not in part for part in parts)
    return (
        plain and len(parts) <= 2 and readers.suffix(Path(name)) not in readers.SUFFIXES
    )


def _hub(source: str, split: str) -> tuple[Any, str | None]:
    """The data set's builder, and its own name of `split`."""
    import datasets

    if not datasets.config.HF_HUB_OFFLINE and not _online(datasets.config.HF_ENDPOINT):
        raise _unreachable(source, "the Hub cannot be reached")
    try:
        name, _, revision = source.partition("@")
        builder = datasets.load_dataset_builder(name, revision=revision or None)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise _unreachable(source, error) from None
    names = builder.info.splits or {"train": None}
    return builder, next((n for n in readers.SPLITS[split] if n in names), None)


def _hub_opened(source: str, split: str, streaming: bool):
    import datasets

    _, name = _hub(source, split)
    if name is None:
        raise UserError(f"this data set has no split for {split!r}", place=source)
    faults = (OSError, ValueError, datasets.exceptions.DatasetsError)
    try:
        place, _, revision = source.partition("@")
        rows = datasets.load_dataset(
            place, split=name, streaming=streaming, revision=revision or None
        )
    except faults as error:
        raise _unreachable(source, error) from None

    def records() -> Iterator[readers.LocatedRecord]:
        try:
            for index, row in enumerate(rows):
                yield f"{source}/{name}[{index}]", row
        except faults as error:
            raise _unreachable(source, error) from None

    return records


def _online(endpoint: str) -> bool:
    """Whether the Hub answers; asked first because its client retries for 25 s."""
    if getproxies():
        return True
    url = urlsplit(endpoint)
    try:
        socket.create_connection((url.hostname, url.port or 443), timeout=10).close()
    except OSError:
        return False
    return True


def _unreachable(source: str, error: Exception | str) -> UserError:
    return UserError(
        "there is no file or folder of this name, and as a data set of the Hub it "
        f"cannot be read: {error}",
        hint="check the name and the network, or name a local file; "
        "HF_HUB_OFFLINE=1 reads a copy in the cache",
        place=source,
    )
