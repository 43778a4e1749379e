"""Training and validation records of a recipe, and the held-out split."""

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

from ..config.data import DataConfig
from ..errors import UserError
from ..files.artifacts import Artifact
from . import cache, fingerprint
from .dataset import (
    Find,
    ReadStats,
    RecordReader,
    has_split,
    source_fingerprint,
    source_size,
)
from .record_formats import DataRecord

T = TypeVar("T")
EVAL_SHARE = 0.05
EVAL_MAX_EXAMPLES = 2_000
# Of a small source: the share is doubled to hold out up to so many.
EVAL_MIN_EXAMPLES = 50
EVAL_FILE = "records.jsonl"
_MASK = 2**64 - 1


@dataclass(frozen=True)
class EvalSplit:
    """The held-out records of a source.

    Attributes:
        threshold: records whose random number is at most this are held out; None = the
            tail of the only document is.
    """

    records: list[DataRecord]
    threshold: int | None

    def remaining(
        self, records: Iterable[DataRecord], seed: int
    ) -> Iterator[DataRecord]:
        """The other records of the source, in order."""
        for index, record in enumerate(records):
            if self.threshold is None:
                yield _split_document(record)[0]
            elif random_u64(seed, index) > self.threshold:
                yield record


def random_u64(seed: int, index: int) -> int:
    """A random number below 2**64 for every index (SplitMix64, Steele 2014)."""
    state = seed
    for step in (1, index + 1):
        state = (state + step * 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def choose_eval_records(
    records: Iterable[DataRecord], seed: int, limit: int = EVAL_MAX_EXAMPLES
) -> EvalSplit:
    """Hold out the records with the lowest random numbers, about `EVAL_SHARE` of them.

    The choice depends on the seed and the positions only. At most `limit` records are
    held out, at least one and never all; of a small source `EVAL_MIN_EXAMPLES`, but at
    most twice the share. A single document gives its tail. Only the held-out records
    are in memory.

    Raises:
        UserError: there is one record, and it cannot be cut.
    """
    bound, fewest = EVAL_SHARE * 2**64, min(limit, EVAL_MIN_EXAMPLES)
    count, held = 0, []
    for index, record in enumerate(records):
        count += 1
        entry = (-random_u64(seed, index), index, record)
        if len(held) < fewest or (-entry[0] < bound and len(held) < limit):
            heapq.heappush(held, entry)
            # Numbers above the bound only fill up.
            if len(held) > fewest and -held[0][0] >= bound:
                heapq.heappop(held)
        elif entry > held[0]:
            heapq.heappushpop(held, entry)
    if count == 1:
        return EvalSplit([_split_document(held[0][2])[1]], None)
    most = max(1, int(2 * EVAL_SHARE * count))
    while len(held) == count or (len(held) > most and -held[0][0] >= bound):
        heapq.heappop(held)
    threshold = -held[0][0]
    in_order = sorted(held, key=lambda entry: entry[1])
    return EvalSplit([record for _, _, record in in_order], threshold)


def validation_sources(
    valid: Sequence[str], train: Sequence[str], find: Find
) -> Sequence[str]:
    """The sources of validation records: those given, or those of `train` that have
    some; none = a share of every training source is held out."""
    given = dict.fromkeys(train)
    return valid or [s for s in given if has_split(s, "valid", find=find)]


def num_held_out(count: float) -> float:
    """About how many of so many records `choose_eval_records` holds out."""
    share = EVAL_SHARE * count
    return min(EVAL_MAX_EXAMPLES, max(share, min(EVAL_MIN_EXAMPLES, 2 * share)))


def write_eval_split(folder: Path, held: EvalSplit) -> dict:
    """Write the records into a cache folder; returns the other facts."""
    with (folder / EVAL_FILE).open("w", encoding="utf-8") as stream:
        for record in held.records:
            # Parquet files may hold dates; templates write them as text too.
            stream.write(json.dumps(vars(record), default=str) + "\n")
    return {"threshold": held.threshold}


def read_eval_split(artifact: Artifact) -> EvalSplit:
    """The split that `write_eval_split` wrote."""
    with (artifact.folder / EVAL_FILE).open(encoding="utf-8") as stream:
        values = [json.loads(line) for line in stream]
    # JSON stores tuples as lists.
    records = [
        DataRecord(**{k: tuple(v) if isinstance(v, list) else v for k, v in r.items()})
        for r in values
    ]
    return EvalSplit(records, artifact.facts["threshold"])


def _split_document(record: DataRecord) -> tuple[DataRecord, DataRecord]:
    """A document without its tail, and the tail, cut at the end of a line."""
    text = record.text or ""
    cut = text.rfind("\n", 0, round(len(text) * (1 - EVAL_SHARE))) + 1
    if not text[:cut].strip() or not text[cut:].strip():
        raise UserError(
            "there is only one example, so none can be held out for validation",
            hint="set data.valid",
            place=record.where,
        )
    return replace(record, text=text[:cut]), replace(record, text=text[cut:])


def in_turn(sources: Iterable[Iterable[T]]) -> Iterator[T]:
    """An item of every source in turn, until all sources end."""
    end = object()
    for items in zip_longest(*sources, fillvalue=end):
        yield from (item for item in items if item is not end)


class TrainDataset:
    """All training records except held-out ones. Every iteration reads them again.

    They come from all sources in turn, as some callers read only the first ones.

    Args:
        held: returns the held-out split of each source; None = nothing is held out.
    """

    def __init__(
        self,
        sources: list[str],
        read: Callable[[str], RecordReader],
        held: Callable[[], dict[str, EvalSplit]] | None,
        seed: int,
    ):
        self.sources = sources
        self._stats: dict[str, ReadStats] = {}
        self._read = read
        self._held = held
        self._seed = seed

    def __iter__(self) -> Iterator[DataRecord]:
        return in_turn(map(self.records, self.sources))

    def records(self, source: str) -> Iterator[DataRecord]:
        """The records of one of the sources."""
        held = self._held() if self._held else {}
        split, records = held.get(source), self._read(source)
        yield from split.remaining(records, self._seed) if split else records
        self._stats[source] = records.stats

    @property
    def stats(self) -> dict[str, ReadStats]:
        """Counts of the last complete iteration, by source."""
        return {source: self._stats[source] for source in self.sources}


class Splits:
    """The training and validation records of a recipe, read on first use.

    Without `valid` in the recipe, the validation splits of the training sources are
    used. If no source has one, a share of every source is held out.

    Args:
        find: resolves the path of a local source.
        info, warning: log what was read and what was skipped.
    """

    def __init__(
        self,
        data: DataConfig,
        *,
        find: Callable[[str], Path | None],
        seed: int,
        info: Callable[[str], None],
        warning: Callable[[str], None],
    ):
        self.data = data
        self.find = find
        self.seed = seed
        self.info = info
        self.warning = warning

    @cached_property
    def valid(self) -> list[DataRecord]:
        """All validation records, from all sources in turn."""
        if not self._valid_sources:
            held = [*in_turn(split.records for split in self._held.values())]
            self.info(f"valid: {len(held):,} examples held out from train")
            return held
        by_source = {}
        for source in dict.fromkeys(self._valid_sources):
            records = self._read(source, "valid")
            by_source[source] = list(records)
            log_read_stats("valid", records.stats, self.info, self.warning)
        return [*in_turn(by_source[source] for source in self._valid_sources)]

    @cached_property
    def train(self) -> TrainDataset:
        """All training records."""
        held = None if self._valid_sources else lambda: self._held
        read = partial(self._read, split="train")
        return TrainDataset(self.data.train, read, held, self.seed)

    @cached_property
    def fingerprint(self) -> list:
        """A value that changes with the training records."""
        sources = [self._contents[source] for source in self.data.train]
        held = (
            []
            if self._valid_sources
            else [self.seed, EVAL_SHARE, EVAL_MIN_EXAMPLES, self._eval_limit]
        )
        return [sources, self.data.columns, self.data.max_samples, held]

    @property
    def size(self) -> int:
        """Bytes of the local training files."""
        return sum(source_size(s, "train", find=self.find) for s in self.data.train)

    @cached_property
    def _valid_sources(self) -> Sequence[str]:
        return validation_sources(self.data.valid, self.data.train, self.find)

    @cached_property
    def _contents(self) -> dict[str, list]:
        sources = dict.fromkeys(self.data.train)
        # The places of examples that are skipped are stored, too.
        return {
            s: [str(self.find(s)), source_fingerprint(s, "train", find=self.find)]
            for s in sources
        }

    @property
    def _eval_limit(self) -> int:
        """Maximum number of records held out of one source."""
        return max(1, EVAL_MAX_EXAMPLES // len(set(self.data.train)))

    @cached_property
    def _held(self) -> dict[str, EvalSplit]:
        return {source: self._eval_split(source) for source in self._contents}

    def _eval_split(self, source: str) -> EvalSplit:
        settings = [
            self.data.columns,
            self.data.max_samples,
            self.seed,
            EVAL_SHARE,
            self._eval_limit,
        ]

        def make(folder: Path) -> dict:
            self.info(f"valid: holding out examples of {source}")
            records = self._read(source, "train")
            held = choose_eval_records(records, self.seed, self._eval_limit)
            return write_eval_split(folder, held)

        artifact = cache.store(self.warning).get_or_make(
            "held-out",
            cache.key_of([self._contents[source], settings, fingerprint.code()]),
            make,
        )
        return read_eval_split(artifact)

    def _read(self, source: str, split: str) -> RecordReader:
        data = self.data
        return RecordReader(
            source,
            split=split,
            find=self.find,
            columns=data.columns,
            streaming=data.streaming,
            limit=data.max_samples,
        )


def log_read_stats(split: str, stats: ReadStats, info, warning) -> None:
    """Log the counts of a source, and the first skipped examples."""
    for text in stats.counts():
        info(f"{split}: {text}")
    for text in stats.problems():
        warning(text)
