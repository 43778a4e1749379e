"""A table that prints aligned and renders as HTML in a notebook."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

from ..run.tables import aligned


@dataclass(frozen=True)
class Table:
    """Text cells. Only the first column is left-aligned."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        return "\n".join(aligned([list(self.columns), *map(list, self.rows)]))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
