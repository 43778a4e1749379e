"""Reads the records of any source, detects their format and skips invalid ones."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ..config.messages import nearest
from ..errors import UserError, shorten
from . import builtin, folders, readers, record_formats
from .hub_datasets import HubDataset
from .record_formats import DataRecord

# Records from which the format is detected, and skipped records that are logged.
DETECTION_RECORDS, MAX_LOGGED = 200, 5
# Characters of the keys in a message.
MAX_KEYS_SHOWN = 100
# Resolves a relative path of the recipe; None = there is no such path.
Find = Callable[[str], Path | None]


@dataclass(frozen=True)
class ReadStats:
    """Counts of one pass over a source.

    Attributes:
        format: chat, preference, unpaired_preference, completion, instruction or text.
        records: number of valid records.
        skipped: number of invalid records.
        first_skipped: (where, reason) of the first invalid records.
        unknown: columns, and keys of messages, that lmx does not know.
        files: the files of a folder by their split.
    """

    source: str
    format: str
    records: int
    skipped: int
    first_skipped: tuple[tuple[str, str], ...]
    unknown: tuple[str, ...] = ()
    files: str = ""

    def counts(self) -> Iterator[str]:
        """What was read, in the words of the log."""
        yield f"{self.source}: {self.records:,} examples, format {self.format}"
        if self.files:
            yield f"{self.source}: {self.files}"
        if self.unknown:
            names = shorten(", ".join(self.unknown))
            yield f"{self.source}: keys that lmx does not use: {names}"

    def problems(self) -> Iterator[str]:
        """What was skipped, in the words of the log."""
        for where, reason in self.first_skipped:
            yield f"{where}: example skipped: {reason}"
        if more := self.skipped - len(self.first_skipped):
            yield f"{self.source}: {more:,} more examples skipped"


class UnknownFormat(UserError):
    """No dataset format matches the examples of a source.

    Attributes:
        keys: of the first example.
        columns: the column for each key of the nearest format; None = none is similar.
    """

    def __init__(self, keys: list[str], place: str):
        self.keys = keys
        name, self.columns = record_formats.nearest(keys)
        pairs = (f"{k}: {v or '<your column>'}" for k, v in self.columns.items())
        super().__init__(
            f"no dataset format matches the keys {', '.join(keys) or '(none)'}",
            hint=f"the nearest format is {name} ({', '.join(self.columns)}); map its "
            f"columns:\ndata:\n  columns: {{{', '.join(pairs)}}}",
            place=place,
        )


class RecordReader:
    """The records of one source. Every iteration reads the source again.

    Args:
        source: builtin:<name>, a file or folder, or a Hub dataset (see `HubDataset`).
        split: train, valid or test.
        find: resolves a relative path of the recipe.
        columns: lmx's name of a column -> the source's name.
        streaming: read a Hub dataset without downloading all of it.
        limit: maximum number of records.

    Attributes:
        format: the format of most of the first records; others are skipped.
        stats: counts of the last complete iteration; None before it.

    Raises:
        UserError: the source is missing, damaged (with its line), empty, has an
            unknown format, or lacks one of the `columns`; from an iteration, also if no
            record is valid.
    """

    def __init__(
        self,
        source: str,
        *,
        split: str = "train",
        find: Find = Path,
        columns: Mapping[str, str] | None = None,
        streaming: bool = False,
        limit: int | None = None,
    ):
        # Built-in data has no columns of the user's.
        is_own = not source.startswith(builtin.PREFIX)
        self._columns = dict(columns or {}) if is_own else {}
        record_formats.check_columns(self._columns)
        self.source = source
        self.stats: ReadStats | None = None
        self._limit = limit
        self._split = split
        self._open = _opener(source, split, find, streaming)
        self._files = folders.describe(find(source) or Path(source), split)
        first = [*islice(self._records(), DETECTION_RECORDS)]
        if not first:
            raise UserError("the source has no examples", place=source)
        self._require_columns()
        formats = Counter(name for _, _, name in first)
        del formats[None]
        if not formats:
            record = first[0][1]
            if isinstance(record, record_formats.Unreadable):
                message = f"no example can be read; the first: {record.reason}"
                raise UserError(message, place=source)
            if not isinstance(record, dict):
                raise UserError(
                    "the examples are not JSON objects; the first is "
                    f"{str(record)[:60]!r}",
                    hint='an example looks like {"prompt": "...", "completion": "..."}',
                    place=source,
                )
            raise UnknownFormat(list(record), source)
        self.format = formats.most_common(1)[0][0]

    def _require_columns(self) -> None:
        missing, keys = {*self._columns.values()}, set[str]()
        # Reads on to the end only if a column is missing.
        for _, record in islice(self._open(), self._limit) if missing else ():
            if isinstance(record, dict):
                missing -= record.keys()
                keys.update(record)
            if not missing:
                return
        if missing:
            name = min(missing)
            raise UserError(
                f"no example has the column {name!r} that `data.columns` names",
                hint=nearest(name, sorted(keys)),
                place=self.source,
            )

    def __iter__(self) -> Iterator[DataRecord]:
        valid, skipped, logged, keys, unknown = 0, 0, [], "none", set()
        for where, raw, name in self._records():
            try:
                record = _parse(where, raw, name, self.format, self._split)
            except record_formats.BadSource as error:
                raise UserError(str(error), place=where) from None
            except record_formats.BadRecord as error:
                skipped += 1
                if skipped <= MAX_LOGGED:
                    logged.append((where, str(error)))
                if skipped == 1 and isinstance(raw, dict):
                    keys = ", ".join(raw)
                continue
            valid += 1
            unknown.update(record_formats.unknown_keys(raw, self.format))
            yield record
        if not valid:
            where, reason = logged[0]
            needed = " and ".join(record_formats.FORMATS[self.format].keys)
            raise UserError(
                f"no example is valid: all {skipped} are invalid as {self.format}; the "
                f"first: {reason} ({where}); its keys: {keys}",
                hint=f"examples of the format {self.format} need {needed}",
                place=self.source,
            )
        counts = (valid, skipped, tuple(logged), tuple(sorted(unknown)))
        self.stats = ReadStats(self.source, self.format, *counts, self._files)

    def _records(self) -> Iterator[tuple[str, object, str | None]]:
        """Location, record with lmx's names, and its format."""
        for where, record in islice(self._open(), self._limit):
            yield where, *record_formats.apply_columns(record, self._columns)


def has_split(source: str, split: str, *, find: Find = Path) -> bool:
    """Whether `source` has a split of this name; a single file has none."""
    if source.startswith(builtin.PREFIX):
        return split in builtin.SPLITS
    if hub := HubDataset.parse(source, find):
        return hub.has_split(split)
    return folders.has_split(find(source) or Path(source), split)


def source_fingerprint(source: str, split: str, *, find: Find = Path) -> list:
    """A value that changes with the content of `source`, without parsing it.

    It has names of files, and no folders.

    Raises:
        UserError: the source is missing or cannot be read.
    """
    if source.startswith(builtin.PREFIX):
        text = json.dumps(builtin.read(source.removeprefix(builtin.PREFIX), split))
        return [source, hashlib.sha256(text.encode()).hexdigest()]
    if hub := HubDataset.parse(source, find):
        return hub.fingerprint(split)
    path = find(source) or Path(source)
    return [
        [p.name, readers.content_hash(p)] for p in folders.list_data_files(path, split)
    ]


def source_size(source: str, split: str, *, find: Find = Path) -> int:
    """Bytes of the files of a local source; 0 for others, whose size is unknown."""
    path = find(source) or Path(source)
    if source.startswith(builtin.PREFIX) or not path.exists():
        return 0
    return sum(file.stat().st_size for file in folders.list_data_files(path, split))


def _opener(source: str, split: str, find: Find, streaming: bool):
    """A function that reads the source from its start at every call."""
    if source.startswith(builtin.PREFIX):
        documents = builtin.read(source.removeprefix(builtin.PREFIX), split)
        return lambda: ((f"{source}/{where}", {"text": t}) for where, t in documents)
    if hub := HubDataset.parse(source, find):
        return hub.opener(split, streaming=streaming)
    files = folders.list_data_files(find(source) or Path(source), split)
    return lambda: (record for file in files for record in readers.read_records(file))


def _parse(
    where: str, raw: object, own_format: str | None, name: str, split: str
) -> DataRecord:
    if isinstance(raw, record_formats.Unreadable):
        raise record_formats.BadRecord(raw.reason)
    if own_format != name:
        keys = ", ".join(raw) if isinstance(raw, dict) else "no object"
        keys = keys[:MAX_KEYS_SHOWN].encode(errors="replace").decode()
        raise record_formats.BadRecord(f"not {name}: it has {keys or 'no keys'}")
    if named := folders.splits_in(str(raw.get("split", ""))):
        if named != {split}:
            reason = f"its column split is {raw['split']}, not {split}"
            raise record_formats.BadRecord(reason)
        # It is read, so it is not named with the keys that are not.
        del raw["split"]
    skill = raw.get("skill")
    try:
        fields = record_formats.parse_record(raw, name)
    except RecursionError:
        raise record_formats.BadRecord(record_formats.UNREADABLE.reason) from None
    return DataRecord(where, **fields, skill=skill if isinstance(skill, str) else None)
