"""What a recipe reads: its sources, and the rows they give, said aloud."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ..section import Section
from .formats import Row, has_split, read, split_off

NAMED = 5
SHARE = 0.05


def _listed(value):
    return [value] if isinstance(value, str) else value


Sources = Annotated[list[str], BeforeValidator(_listed)]


class Data(Section):
    """What is read, and which of its tokens are trained."""

    train: Sources = Field([])
    """Files, folders, Hub ids or builtin:<name>."""
    valid: Sources = Field([])
    """Held-out rows; absent = a split valid or validation, else rows set aside."""
    max_length: int = Field(512, ge=8)
    """Longest row in tokens; text is cut into windows, longer chats truncated."""
    train_on: Literal["answers", "everything"] = "answers"
    """answers = every assistant turn or completion; everything = all tokens."""
    columns: dict[str, str] = Field({})
    """Names of your columns: {prompt: question, completion: answer}."""
    streaming: bool = False
    """Read a Hub data set as a stream, without downloading it whole; needs limit."""
    limit: int | None = Field(None, ge=1)
    """Rows to read of each source, at most."""


def read_splits(
    data: Data,
    *,
    find: Callable[[str], Path | None],
    seed: int,
    say: Callable[[str], None],
    warn: Callable[[str], None],
) -> tuple[list[Row], list[Row]]:
    """All training rows and all validation rows.

    Without `valid`, the sources' own validation splits; if none has one, a share of
    every source. A source named twice is held out from both times.

    Args:
        find: the path of a local source.
        say, warn: told what was read, and which rows were not.
    """

    def rows_of(sources: list[str], split: str) -> dict[str, list[Row]]:
        return {
            source: _read(data, source, split, find, say, warn)
            for source in dict.fromkeys(sources)
        }

    train = rows_of(data.train, "train")
    own = [source for source in train if has_split(source, "valid", find=find)]
    if sources := data.valid or own:
        return _joined(train, data.train), _joined(rows_of(sources, "valid"), sources)
    parts = {source: split_off(rows, SHARE, seed) for source, rows in train.items()}
    rest, held_out = ({s: part[i] for s, part in parts.items()} for i in (0, 1))
    say(f"valid: {sum(map(len, held_out.values())):,} rows set aside from train")
    return _joined(rest, data.train), _joined(held_out, list(held_out))


def _joined(rows: dict[str, list[Row]], sources: list[str]) -> list[Row]:
    return [row for source in sources for row in rows[source]]


def _read(data: Data, source: str, split: str, find, say, warn) -> list[Row]:
    found = read(
        source,
        split=split,
        find=find,
        columns=data.columns,
        streaming=data.streaming,
        limit=data.limit,
    )
    say(f"{split}: {source}: {len(found.rows):,} rows, format {found.format}")
    for where, reason in found.bad[:NAMED]:
        warn(f"{where}: row skipped: {reason}")
    if len(found.bad) > NAMED:
        warn(f"{source}: {len(found.bad) - NAMED:,} more rows skipped")
    return found.rows
