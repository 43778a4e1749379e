"""What a recipe reads: its sources, and the rows they give, said aloud."""

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ..section import Section
from . import cache, held_out, keys
from .formats import Row, Rows, Tally, fingerprint, has_split, size
from .held_out import MOST, SHARE, HeldOut


def _listed(value):
    return [value] if isinstance(value, str) else value


Sources = Annotated[list[str], BeforeValidator(_listed)]


class Data(Section):
    """What is read, and which of its tokens are trained."""

    train: Sources = Field([])
    """A file, folder, Hub id (owner/name, owner/name@revision) or builtin:<name>, or a
    list of them."""
    valid: Sources = Field([])
    """Held-out rows; absent = a split valid or validation, else rows set aside."""
    max_length: int = Field(512, ge=8)
    """Longest row in tokens; text is cut into windows, longer chats truncated."""
    train_on: Literal["answers", "everything"] = "answers"
    """answers = every assistant turn or completion; everything = all tokens."""
    columns: dict[str, str] = Field({})
    """Names of your columns: {prompt: question, completion: answer}."""
    streaming: bool = False
    """Read a Hub data set as a stream, without downloading it whole."""
    limit: int | None = Field(None, ge=1)
    """Rows to read of each source, at most."""


class TrainRows:
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
        read: Callable[[str], Rows],
        held: Callable[[], dict[str, HeldOut]] | None,
        seed: int,
    ):
        self.sources = sources
        self.tallies: dict[str, Tally] = {}
        self._read = read
        self._held = held
        self._seed = seed

    def __iter__(self) -> Iterator[Row]:
        held = self._held() if self._held else {}
        for source in self.sources:
            rows = self._read(source)
            part = held.get(source)
            yield from part.rest(rows, self._seed) if part else rows
            self.tallies[source] = rows.tally


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
        data: Data,
        *,
        find: Callable[[str], Path | None],
        seed: int,
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ):
        self.data = data
        self.find = find
        self.seed = seed
        self.say = say
        self.warn = warn

    @cached_property
    def valid(self) -> list[Row]:
        """All validation rows."""
        if not self._valid_sources:
            held = [row for part in self._held.values() for row in part.rows]
            self.say(f"valid: {len(held):,} rows set aside from train")
            return held
        found = {}
        for source in dict.fromkeys(self._valid_sources):
            rows = self._read(source, "valid")
            found[source] = list(rows)
            tell("valid", rows.tally, self.say, self.warn)
        return [row for source in self._valid_sources for row in found[source]]

    @cached_property
    def train(self) -> TrainRows:
        """All training rows."""
        held = None if self._valid_sources else lambda: self._held
        read = partial(self._read, split="train")
        return TrainRows(self.data.train, read, held, self.seed)

    @cached_property
    def fingerprint(self) -> list:
        """What changes when the training rows do."""
        sources = [self._contents[source] for source in self.data.train]
        held = [] if self._valid_sources else [self.seed, SHARE, self._most]
        return [sources, self.data.columns, self.data.limit, held]

    @property
    def size(self) -> int:
        """Bytes of the local training files."""
        return sum(size(s, "train", find=self.find) for s in self.data.train)

    @cached_property
    def _valid_sources(self) -> list[str]:
        if self.data.valid:
            return self.data.valid
        train = dict.fromkeys(self.data.train)
        return [s for s in train if has_split(s, "valid", find=self.find)]

    @cached_property
    def _contents(self) -> dict[str, list]:
        sources = dict.fromkeys(self.data.train)
        return {s: fingerprint(s, "train", find=self.find) for s in sources}

    @property
    def _most(self) -> int:
        """Rows held out of one source, at most."""
        return max(1, MOST // len(set(self.data.train)))

    @cached_property
    def _held(self) -> dict[str, HeldOut]:
        return {source: self._held_out_of(source) for source in self._contents}

    def _held_out_of(self, source: str) -> HeldOut:
        settings = [self.data.columns, self.data.limit, self.seed, SHARE, self._most]
        kept = cache.kept(
            "held-out",
            cache.key_of([self._contents[source], settings, keys.code()]),
            lambda folder: held_out.write(folder, self._choose(source)),
            warn=self.warn,
        )
        return held_out.read(kept)

    def _choose(self, source: str) -> HeldOut:
        self.say(f"valid: setting rows of {source} aside")
        return held_out.choose(self._read(source, "train"), self.seed, self._most)

    def _read(self, source: str, split: str) -> Rows:
        data = self.data
        return Rows(
            source,
            split=split,
            find=self.find,
            columns=data.columns,
            streaming=data.streaming,
            limit=data.limit,
        )


def tell(split: str, tally: Tally, say, warn) -> None:
    """Say what was read of a source, and which rows were not."""
    source = tally.source
    say(f"{split}: {source}: {tally.rows:,} rows, format {tally.format}")
    for where, reason in tally.named:
        warn(f"{where}: row skipped: {reason}")
    if more := tally.bad - len(tally.named):
        warn(f"{source}: {more:,} more rows skipped")
