"""Rows set aside for validation: by seed and position alone, the same everywhere."""

import heapq
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import UserError
from .cache import Kept
from .shapes import Row

SHARE = 0.05
MOST = 2_000
ROWS = "rows.jsonl"
_MASK = 2**64 - 1


@dataclass(frozen=True)
class HeldOut:
    """The rows of a source that are held out.

    Attributes:
        edge: the rows with a draw up to this are held out; None = the tail of the one
            document there is.
    """

    rows: list[Row]
    edge: int | None

    def rest(self, rows: Iterable[Row], seed: int) -> Iterator[Row]:
        """The other rows of the source, in their order."""
        for index, row in enumerate(rows):
            if self.edge is None:
                yield _cut(row)[0]
            elif draw(seed, index) > self.edge:
                yield row


def draw(seed: int, index: int) -> int:
    """A number below 2**64, another one for every index (SplitMix64, Steele 2014)."""
    state = seed
    for step in (1, index + 1):
        state = (state + step * 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def choose(rows: Iterable[Row], seed: int, most: int = MOST) -> HeldOut:
    """Hold out the rows whose draw lies in the lowest `SHARE`.

    Of those the `most` lowest, at least one and never all; a single document gives its
    tail. Holds no more rows in memory than that.

    Raises:
        UserError: there is one row, and it cannot be cut.
    """
    below, count, held = SHARE * 2**64, 0, []
    for index, row in enumerate(rows):
        count += 1
        found = (-draw(seed, index), index, row)
        # The lowest so far is held in any case, until one below the share is found.
        if len(held) == 1 and -held[0][0] >= below and found > held[0]:
            held[0] = found
        elif not held or (-found[0] < below and len(held) < most):
            heapq.heappush(held, found)
        elif -found[0] < below:
            heapq.heappushpop(held, found)
    if count == 1:
        return HeldOut([_cut(held[0][2])[1]], None)
    if len(held) == count:
        heapq.heappop(held)
    edge = -held[0][0]
    return HeldOut([row for _, _, row in sorted(held, key=lambda h: h[1])], edge)


def write(folder: Path, held: HeldOut) -> dict:
    """Write the rows into a folder of the cache; returns the other facts."""
    with (folder / ROWS).open("w", encoding="utf-8") as stream:
        for row in held.rows:
            # A Parquet file may hold dates, which a template writes as text, too.
            stream.write(json.dumps(vars(row), default=str) + "\n")
    return {"edge": held.edge}


def read(kept: Kept) -> HeldOut:
    """What `write` wrote."""
    with (kept.folder / ROWS).open(encoding="utf-8") as stream:
        rows = [Row(**json.loads(line)) for line in stream]
    rows = [replace(r, messages=r.messages and tuple(r.messages)) for r in rows]
    return HeldOut(rows, kept.facts["edge"])


def _cut(row: Row) -> tuple[Row, Row]:
    """A document without its tail, and the tail, cut at the end of a line."""
    text = row.text or ""
    cut = text.rfind("\n", 0, round(len(text) * (1 - SHARE))) + 1
    if not text[:cut].strip() or not text[cut:].strip():
        raise UserError(
            "there is one row, so none can be held out for validation",
            hint="name other rows in data.valid",
            place=row.where,
        )
    return replace(row, text=text[:cut]), replace(row, text=text[cut:])
