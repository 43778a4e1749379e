"""Errors of a recipe: position, message and hint, all reported at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..errors import UserError, shorten

KeyPath = tuple[str | int, ...]

# Errors of a recipe that are shown.
MAX_RENDERED = 20


class SourcePosition(NamedTuple):
    """A position in a text. Lines and columns count from 1."""

    line: int
    column: int


def address(path: KeyPath) -> str:
    """A path as in an override, such as `stages.1.train.steps`. Lists count from 1."""
    return ".".join(str(p + 1 if isinstance(p, int) else p) for p in path)


@dataclass(frozen=True)
class Problem:
    """A problem at a path of the recipe or in an argument.

    Attributes:
        path: the keys of the faulty value, or of the block that has it.
        of: the part with the fault, whose position is shown: key, value or block.
        place: the position in the text of the recipe; None = not known yet, or all of
            the recipe.
        argument: the override with the fault.
    """

    path: KeyPath
    message: str
    hint: str | None = None
    of: str = "value"
    place: SourcePosition | None = None
    argument: str | None = None

    def render(self, file: Path | None, lines: Sequence[str]) -> str:
        """One to three lines: position and message, the line of the file, the hint.

        Args:
            file: None = the recipe is a dict, whose positions are the keys.
        """
        where, details = str(file or address(self.path) or "recipe"), []
        if self.argument:
            where = f"argument '{shorten(self.argument)}'"
        elif file and self.place:
            line, column = self.place
            where = f"{file}:{line}:{column}"
            text = "".join(lines[line - 1 : line]).strip()
            details = [shorten(text)] if text else []
        details += [f"hint: {self.hint}"] if self.hint else []
        return "\n    ".join([f"{where}: {shorten(self.message)}", *details])


class ConfigErrors(UserError):
    """All errors of a recipe, in the order of its lines, arguments last."""

    def __init__(self, file: Path | None, text: str, errors: Sequence[Problem]):
        self.errors = sorted(
            errors, key=lambda e: (e.argument is not None, e.place or (0, 0))
        )
        count = f"{len(errors)} problem{'s' * (len(errors) > 1)}; nothing was run."
        lines = text.splitlines()
        rendered = [e.render(file, lines) for e in self.errors[:MAX_RENDERED]]
        if len(errors) > MAX_RENDERED:
            rendered.append(f"... and {len(errors) - MAX_RENDERED:,} more")
        super().__init__("\n".join([*rendered, count]))

    def __str__(self) -> str:
        return self.message
