"""What `lmx init` finds in the user's data, so that it can write a recipe for it."""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..data import builtin
from ..data.answer_filters import has_one_form
from ..data.dataset import RecordReader, UnknownFormat
from ..data.record_formats import CHARACTERS_PER_TOKEN, nearest
from ..errors import UserError
from ..pipeline.evaluate.questions import Question
from ..run import terminal

MAX_EXAMPLES = 10_000
# Of a chat template, in an example.
TEMPLATE_TOKENS = 16
# Sources with less examples get a batch of so many.
FEW_EXAMPLES, SMALL_BATCH = 2_000, 8


@dataclass(frozen=True)
class OwnData:
    """The examples of a local source.

    Attributes:
        columns: `data.columns`.
        is_guessed: whether lmx chose the columns.
        examples: at most `MAX_EXAMPLES`.
        mean_tokens: of an example, roughly.
        answer_tokens: of the longest answer that exact match compares, at most; 0 =
            it compares none.
    """

    columns: dict[str, str]
    is_guessed: bool
    examples: int
    mean_tokens: int
    answer_tokens: int

    @property
    def small_batch(self) -> dict[str, int]:
        """The size of a batch of few examples by key; empty = there are many."""
        size, tokens = SMALL_BATCH, SMALL_BATCH * self.mean_tokens
        is_small = self.examples < FEW_EXAMPLES
        return {"batch_size": size, "batch_tokens": tokens} if is_small else {}


def parse_columns(text: str | None) -> dict[str, str]:
    """The argument of `--columns`.

    Raises:
        UserError: it is no list of NAME=COLUMN.
    """
    pairs = [pair.partition("=") for pair in text.split(",")] if text else []
    if not all(name.strip() and column.strip() for name, _, column in pairs):
        message = f"--columns {text}: not a list of NAME=COLUMN"
        raise UserError(message, hint="--columns prompt=question,completion=answer")
    return {name.strip(): column.strip() for name, _, column in pairs}


def inspect(
    source: str, columns: dict[str, str], find: Callable[[str], Path | None]
) -> OwnData | None:
    """Read a local source; None if it is on the Hub or built in.

    Args:
        columns: that the user names; without any, the usual names are recognized, and
            a user at a terminal is asked for others.

    Raises:
        UserError: the source cannot be read with these columns.
    """
    if source.startswith(builtin.PREFIX) or find(source) is None:
        return None

    def read(columns: dict[str, str]) -> RecordReader:
        options = {"columns": columns, "limit": MAX_EXAMPLES}
        return RecordReader(
            source, find=lambda name: find(name) or Path(name), **options
        )

    chosen = columns
    try:
        reader = read(columns)
    except UnknownFormat as error:
        if columns:
            raise
        chosen = _complete(error)
        reader = read(chosen)
    records = [*reader]
    if reader.format == "text" and not columns:
        # Classes beside the texts: more than a text.
        name, renaming = nearest(["text", *reader.stats.unknown])
        if name == "completion" and all(renaming.values()):
            # Numbers are no answers; then they stay texts.
            with suppress(UserError):
                records = [*read(renaming)]
                chosen = renaming
    lengths = [len(record.as_text()) // CHARACTERS_PER_TOKEN for record in records]
    answers = (Question(record).expected or "" for record in records)
    # Numbers and brackets are short tokens.
    compared = [len(text) // 2 + 1 for text in answers if has_one_form(text)]
    return OwnData(
        chosen,
        chosen != columns,
        len(records),
        sum(lengths) // len(lengths) + TEMPLATE_TOKENS,
        max(compared, default=0),
    )


def _complete(error: UnknownFormat) -> dict[str, str]:
    """The columns of the nearest format; the user says those that it lacks.

    Raises:
        UserError: there is no terminal to ask at.
    """
    columns = error.columns
    if all(columns.values()):
        return {name: column for name, column in columns.items() if column}
    if not sys.stdin.isatty():
        pairs = ",".join(f"{k}={v or '<your column>'}" for k, v in columns.items())
        hint = f"name your columns: --columns {pairs}"
        raise UserError(error.message, place=error.place, hint=hint)
    terminal.write_out(f"columns of {error.place}: {', '.join(error.keys)}\n")
    answers = {}
    for name in columns:
        while answers.get(name) not in error.keys:
            terminal.write_out(f"which one is the {name}? ")
            if not (line := sys.stdin.readline()):
                raise UserError(error.message, place=error.place)
            answers[name] = line.strip()
    return answers
