"""Rows set aside for validation: by seed and position alone, the same everywhere."""

import heapq
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from ..config.data import DataConfig
from ..errors import UserError
from . import cache, fingerprint
from .cache import CacheEntry
from .dataset import ReadStats, RecordReader, has_split, source_fingerprint, source_size
from .record_formats import DataRecord

EVAL_SHARE = 0.05
EVAL_MAX_EXAMPLES = 2_000
ROWS = "rows.jsonl"
_MASK = 2**64 - 1


@dataclass(frozen=True)
class EvalSplit:
    """The rows of a source that are held out.

    Attributes:
        edge: the rows with a draw up to this are held out; None = the tail of the one
            document there is.
    """

    rows: list[DataRecord]
    edge: int | None

    def rest(self, rows: Iterable[DataRecord], seed: int) -> Iterator[DataRecord]:
        """The other rows of the source, in their order."""
        for index, row in enumerate(rows):
            if self.edge is None:
                yield _cut(row)[0]
            elif random_u64(seed, index) > self.edge:
                yield row


def random_u64(seed: int, index: int) -> int:
    """A number below 2**64, another one for every index (SplitMix64, Steele 2014)."""
    state = seed
    for step in (1, index + 1):
        state = (state + step * 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def choose_eval_records(
    rows: Iterable[DataRecord], seed: int, most: int = EVAL_MAX_EXAMPLES
) -> EvalSplit:
    """Hold out the rows whose draw lies in the lowest `SHARE`.

    Of those the `most` lowest, at least one and never all; a single document gives its
    tail. Holds no more rows in memory than that.

    Raises:
        UserError: there is one row, and it cannot be cut.
    """
    below, count, held = EVAL_SHARE * 2**64, 0, []
    for index, row in enumerate(rows):
        count += 1
        found = (-random_u64(seed, index), index, row)
        # The lowest so far is held in any case, until one below the share is found.
        if len(held) == 1 and -held[0][0] >= below and found > held[0]:
            held[0] = found
        elif not held or (-found[0] < below and len(held) < most):
            heapq.heappush(held, found)
        elif -found[0] < below:
            heapq.heappushpop(held, found)
    if count == 1:
        return EvalSplit([_cut(held[0][2])[1]], None)
    if len(held) == count:
        heapq.heappop(held)
    edge = -held[0][0]
    return EvalSplit([row for _, _, row in sorted(held, key=lambda h: h[1])], edge)


def write_eval_split(folder: Path, held: EvalSplit) -> dict:
    """Write the rows into a folder of the cache; returns the other facts."""
    with (folder / ROWS).open("w", encoding="utf-8") as stream:
        for row in held.rows:
            # A Parquet file may hold dates, which a template writes as text, too.
            stream.write(json.dumps(vars(row), default=str) + "\n")
    return {"edge": held.edge}


def read_eval_split(kept: CacheEntry) -> EvalSplit:
    """What `write` wrote."""
    with (kept.folder / ROWS).open(encoding="utf-8") as stream:
        rows = [DataRecord(**json.loads(line)) for line in stream]
    rows = [replace(r, messages=r.messages and tuple(r.messages)) for r in rows]
    return EvalSplit(rows, kept.facts["edge"])


def _cut(row: DataRecord) -> tuple[DataRecord, DataRecord]:
    """A document without its tail, and the tail, cut at the end of a line."""
    text = row.text or ""
    cut = text.rfind("\n", 0, round(len(text) * (1 - EVAL_SHARE))) + 1
    if not text[:cut].strip() or not text[cut:].strip():
        raise UserError(
            "there is one row, so none can be held out for validation",
            hint="name other rows in data.valid",
            place=row.where,
        )
    return replace(row, text=text[:cut]), replace(row, text=text[cut:])


# --- from data.sources: What a recipe reads: its sources, and the rows they give, said aloud.


class TrainDataset:
    """All training rows, read anew by every iteration; held-out rows are left out.

    Args:
        held: what is held out of each source, found when it is first needed; None =
            nothing.

    Attributes:
        tallies: what the last iteration read of every source.
    """

    def __init__(
        self,
        sources: list[str],
        read: Callable[[str], RecordReader],
        held: Callable[[], dict[str, EvalSplit]] | None,
        seed: int,
    ):
        self.sources = sources
        self.stats: dict[str, ReadStats] = {}
        self._read = read
        self._held = held
        self._seed = seed

    def __iter__(self) -> Iterator[DataRecord]:
        held = self._held() if self._held else {}
        for source in self.sources:
            rows = self._read(source)
            part = held.get(source)
            yield from part.rest(rows, self._seed) if part else rows
            self.stats[source] = rows.stats


class Splits:
    """The training and the validation rows of a recipe, read when asked for.

    Without `valid`, the sources' own validation splits; if none has one, a share of
    every source. A source named twice is held out from both times.

    Args:
        find: the path of a local source.
        say, warn: told what was read, and which rows were not.
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
        """All validation rows."""
        if not self._valid_sources:
            held = [row for part in self._held.values() for row in part.rows]
            self.info(f"valid: {len(held):,} rows set aside from train")
            return held
        found = {}
        for source in dict.fromkeys(self._valid_sources):
            rows = self._read(source, "valid")
            found[source] = list(rows)
            log_read_stats("valid", rows.stats, self.info, self.warning)
        return [row for source in self._valid_sources for row in found[source]]

    @cached_property
    def train(self) -> TrainDataset:
        """All training rows."""
        held = None if self._valid_sources else lambda: self._held
        read = partial(self._read, split="train")
        return TrainDataset(self.data.train, read, held, self.seed)

    @cached_property
    def fingerprint(self) -> list:
        """What changes when the training rows do."""
        sources = [self._contents[source] for source in self.data.train]
        held = [] if self._valid_sources else [self.seed, EVAL_SHARE, self._most]
        return [sources, self.data.columns, self.data.max_samples, held]

    @property
    def size(self) -> int:
        """Bytes of the local training files."""
        return sum(source_size(s, "train", find=self.find) for s in self.data.train)

    @cached_property
    def _valid_sources(self) -> list[str]:
        if self.data.valid:
            return self.data.valid
        train = dict.fromkeys(self.data.train)
        return [s for s in train if has_split(s, "valid", find=self.find)]

    @cached_property
    def _contents(self) -> dict[str, list]:
        sources = dict.fromkeys(self.data.train)
        return {s: source_fingerprint(s, "train", find=self.find) for s in sources}

    @property
    def _most(self) -> int:
        """Rows held out of one source, at most."""
        return max(1, EVAL_MAX_EXAMPLES // len(set(self.data.train)))

    @cached_property
    def _held(self) -> dict[str, EvalSplit]:
        return {source: self._held_out_of(source) for source in self._contents}

    def _held_out_of(self, source: str) -> EvalSplit:
        settings = [
            self.data.columns,
            self.data.max_samples,
            self.seed,
            EVAL_SHARE,
            self._most,
        ]
        kept = cache.get_or_create(
            "held-out",
            cache.key_of([self._contents[source], settings, fingerprint.code()]),
            lambda folder: write_eval_split(folder, self._choose(source)),
            warning=self.warning,
        )
        return read_eval_split(kept)

    def _choose(self, source: str) -> EvalSplit:
        self.info(f"valid: setting rows of {source} aside")
        return choose_eval_records(self._read(source, "train"), self.seed, self._most)

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


def log_read_stats(split: str, tally: ReadStats, info, warning) -> None:
    """Say what was read of a source, and which rows were not."""
    source = tally.source
    info(f"{split}: {source}: {tally.rows:,} rows, format {tally.format}")
    for where, reason in tally.named:
        warning(f"{where}: row skipped: {reason}")
    if more := tally.bad - len(tally.named):
        warning(f"{source}: {more:,} more rows skipped")
