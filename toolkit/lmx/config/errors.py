"""Faults of a recipe, all told at once: where, what, and what instead."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..errors import UserError

KeyPath = tuple[str | int, ...]


class SourcePosition(NamedTuple):
    """A position in a text, counted from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class ConfigError:
    """One fault, at a place of the file or in an argument; neither = the whole file."""

    message: str
    place: SourcePosition | None = None
    hint: str | None = None
    argument: str | None = None

    def render(self, file: Path, lines: Sequence[str]) -> str:
        """The fault in one to three lines: where and what, the line, the hint."""
        where, shown = str(file), []
        if self.argument:
            where = f"argument '{self.argument}'"
        elif self.place:
            line, column = self.place
            where = f"{file}:{line}:{column}"
            shown = [text] if (text := "".join(lines[line - 1 : line]).strip()) else []
        shown += [f"hint: {self.hint}"] if self.hint else []
        return "\n    ".join([f"{where}: {self.message}", *shown])


class ConfigErrors(UserError):
    """Everything wrong with a recipe, in the order of its lines, arguments last."""

    def __init__(self, file: Path, text: str, faults: Sequence[ConfigError]):
        self.faults = sorted(
            faults, key=lambda f: (f.argument is not None, f.place or (0, 0))
        )
        count = f"{len(faults)} problem{'s' * (len(faults) > 1)}; nothing was run."
        lines = text.splitlines()
        super().__init__(
            "\n".join([f.render(file, lines) for f in self.faults] + [count])
        )
