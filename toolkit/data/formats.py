"""Rows out of any source, their format found from many of them, bad ones named."""

import random
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit
from urllib.request import getproxies

from ..errors import UserError
from . import corpus, files, shapes
from .shapes import Row

LOOKED_AT = 200
BUILTIN = "builtin:"
# Where a relative path of the recipe lies; None = nowhere here.
Find = Callable[[str], Path | None]
_NO_COLUMNS: Mapping[str, str] = MappingProxyType({})

__all__ = ["Row", "Rows", "has_split", "read", "split_off"]


@dataclass(frozen=True)
class Rows:
    """What one source gave.

    Attributes:
        format: chat, preference, completion, instruction or text.
        bad: (where, reason) of every row that was skipped.
    """

    source: str
    format: str
    rows: list[Row]
    bad: list[tuple[str, str]]


def read(
    source: str,
    *,
    split: str = "train",
    find: Find = Path,
    columns: Mapping[str, str] = _NO_COLUMNS,
    streaming: bool = False,
    limit: int | None = None,
) -> Rows:
    """Read one source.

    Args:
        source: builtin:<name>, a file or folder, or the id of a Hub data set.
        split: train, valid or test.
        find: where a relative path of the recipe lies.
        columns: our name of a column -> theirs.
        streaming: read a Hub data set without downloading it whole; needs `limit`.
        limit: rows to read at most.

    Raises:
        UserError: the source is missing, damaged (with its line), empty, or holds no
            row that can be used.
    """
    shapes.check_columns(dict(columns))
    placed = list(islice(_records(source, split, find, streaming, limit), limit))
    if not placed:
        raise UserError("there are no rows here; the source is empty", place=source)
    records = [(where, shapes.renamed(record, columns)) for where, record in placed]
    found = Counter(shapes.format_of(record) for _, record in records[:LOOKED_AT])
    del found[None]
    if not found:
        raise _no_format(source, placed[0][1], columns)
    name = found.most_common(1)[0][0]
    rows, bad = _parsed(records, name)
    if not rows:
        raise _all_bad(source, name, placed[0][1], bad)
    return Rows(source, name, rows, bad)


def has_split(source: str, split: str, *, find: Find = Path) -> bool:
    """Whether `source` itself names rows of `split`; a single file names none."""
    if source.startswith(BUILTIN):
        return split in corpus.SPLITS
    path = find(source) or Path(source)
    if path.exists() or not _is_hub_id(source):
        return files.has_split(path, split)
    return _hub_split(source, split) is not None


def split_off(rows: list[Row], share: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Training rows and held-out rows, the same ones for the same seed.

    A single document gives its tail.
    """
    assert 0 < share < 1
    if len(rows) == 1:
        return _tail_off(rows[0], share)
    count = min(max(1, round(share * len(rows))), len(rows) - 1)
    held = set(random.Random(seed).sample(range(len(rows)), count))
    parts: tuple[list[Row], list[Row]] = ([], [])
    for index, row in enumerate(rows):
        parts[index in held].append(row)
    return parts


def _tail_off(row: Row, share: float) -> tuple[list[Row], list[Row]]:
    text = row.text or ""
    cut = text.rfind("\n", 0, round(len(text) * (1 - share))) + 1
    if not text[:cut].strip() or not text[cut:].strip():
        raise UserError(
            "there is one row, so none can be held out for validation",
            hint="name other rows in data.valid",
            place=row.where,
        )
    return [replace(row, text=text[:cut])], [replace(row, text=text[cut:])]


def _records(source, split, find, streaming, limit) -> Iterator[files.Placed]:
    if source.startswith(BUILTIN):
        documents = corpus.read(source.removeprefix(BUILTIN), split)
        return ((f"{source}/{where}", {"text": text}) for where, text in documents)
    path = find(source) or Path(source)
    if path.exists() or not _is_hub_id(source):
        found = files.chosen(path, split)
        return (placed for file in found for placed in files.records(file))
    if streaming and limit is None:
        raise UserError("streaming needs a limit", hint="data.limit: 10000")
    return _hub_records(source, split, streaming)


def _parsed(records: list, name: str) -> tuple[list[Row], list[tuple[str, str]]]:
    rows, bad = [], []
    for where, record in records:
        try:
            rows.append(_row(where, record, name))
        except shapes.BadRow as error:
            bad.append((where, str(error)))
    return rows, bad


def _row(where: str, record: object, name: str) -> Row:
    if shapes.format_of(record) != name:
        keys = ", ".join(record) if isinstance(record, dict) else "no object"
        raise shapes.BadRow(f"not {name}: it holds {keys or 'no keys'}")
    skill = record.get("skill")
    fields = shapes.FORMATS[name].parse(record)
    return Row(where, **fields, skill=skill if isinstance(skill, str) else None)


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
    name, renaming = shapes.nearest(keys)
    pairs = ", ".join(f"{our}: {their}" for our, their in renaming.items())
    return UserError(
        f"no format fits; the keys found are {', '.join(keys) or 'none'}{absent}",
        hint=f"nearest is {name} ({', '.join(renaming)}); say which column is which:\n"
        f"data:\n  columns: {{{pairs}}}",
        place=source,
    )


def _all_bad(source: str, name: str, record: dict, bad: list) -> UserError:
    where, reason = bad[0]
    keys = ", ".join(record) if isinstance(record, dict) else "none"
    return UserError(
        f"no row can be used; all {len(bad)} are bad as {name}, the first because "
        f"{reason} ({where}); keys found: {keys}",
        hint=f"a {name} row needs {' and '.join(shapes.FORMATS[name].keys)}",
        place=source,
    )


def _is_hub_id(source: str) -> bool:
    """name or owner/name; what ends as a file does is a file, there or not."""
    parts = source.split("/")
    plain = all(part and part.strip(".~") and "\\" not in part for part in parts)
    return (
        plain and len(parts) <= 2 and files.suffix(Path(source)) not in files.SUFFIXES
    )


def _hub_split(source: str, split: str) -> str | None:
    """The data set's own name of `split`."""
    import datasets

    if not datasets.config.HF_HUB_OFFLINE and not _online(datasets.config.HF_ENDPOINT):
        raise _unreachable(source, "the Hub cannot be reached")
    try:
        builder = datasets.load_dataset_builder(source)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise _unreachable(source, error) from None
    names = builder.info.splits or {"train": None}
    return next((name for name in files.SPLITS[split] if name in names), None)


def _hub_records(source: str, split: str, streaming: bool) -> Iterator[files.Placed]:
    import datasets

    name = _hub_split(source, split)
    if name is None:
        raise UserError(f"this data set has no split for {split!r}", place=source)
    try:
        rows = datasets.load_dataset(source, split=name, streaming=streaming)
        for index, row in enumerate(rows):
            yield f"{source}/{name}[{index}]", row
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise _unreachable(source, error) from None


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
