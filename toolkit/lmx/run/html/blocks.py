"""A page made of blocks: JSON values in the page, which page.js draws.

A block is a dict: a table (`rows`), a chart (`lines`), or else a heading (`title`) with
a text (`text`). The reader opens a `folded` table or text. A browser without JavaScript
shows the same blocks as text.
"""

import base64
import hashlib
import html
import json
from pathlib import Path
from string import Template
from typing import Any

from ..progress import format_number
from ..tables import ABSENT
from ..terminal import visible

MAX_POINTS = 240
TABLE_ROWS = 12

Block = dict[str, Any]
# Position and value; None is a gap.
Point = tuple[float, float | None]


def text(words: str, title: str = "", *, folded: bool = False) -> Block:
    """A text as it is, below its title."""
    return {"title": title, "text": words, "folded": folded}


def table(
    title: str,
    columns: list[str],
    rows: list[list[Any]],
    kind: str = "",
    *,
    folded: bool = False,
) -> Block:
    """A table. A cell is text, or a dict of its `text` and its HTML attributes.

    Args:
        columns: none = without headings.
        kind: of the style sheet.
    """
    block = {"title": title, "rows": rows, "kind": kind, "folded": folded}
    return block | {"columns": [column or "metric" for column in columns]}


def line_chart(
    title: str, unit: str, lines: dict[str, list[Point]], *, across: str = "step"
) -> Block:
    """A chart of lines by name, with a table of some values.

    Args:
        across: what a position is.
    """
    known = {
        name: values
        for name, points in lines.items()
        if (values := {x: y for x, y in points if y is not None})
    }
    xs = sorted({x for points in known.values() for x in points})
    # Evenly spaced rows, including the first and the last.
    count = min(TABLE_ROWS, len(xs))
    rows = []
    for x in (xs[round(i * (len(xs) - 1) / max(1, count - 1))] for i in range(count)):
        shown = (format_number(p[x]) if x in p else ABSENT for p in known.values())
        rows.append([format_number(x), *shown])
    for word, best in (("lowest", min), ("highest", max)) if known else ():
        places = [(p, best(p, key=p.get)) for p in known.values()]
        shown = (f"{format_number(p[x])} at {format_number(x)}" for p, x in places)
        rows.append([word, *shown])
    return {
        "title": title,
        "unit": unit,
        "lines": [(name, _means(lines[name])) for name in known],
        "table": table(f"{title}, {unit}", [across, *known], rows, folded=True),
    }


def _means(points: list[Point]) -> list[Point]:
    """At most MAX_POINTS points: means of neighbors, at the last of them."""
    size, means = -(-len(points) // MAX_POINTS), []
    for start in range(0, len(points), size):
        chunk = points[start : start + size]
        values = [value for _, value in chunk if value is not None]
        mean = float(f"{sum(values) / len(values):.6g}") if values else None
        means.append((chunk[-1][0], mean))
    return means


def render(
    title: str,
    header: list[Block],
    sections: dict[str, list[Block]],
    *,
    refresh_seconds: int | None = None,
) -> str:
    """A whole page.

    Args:
        sections: blocks by title. Those without a value are left out.
        refresh_seconds: the browser loads the page again after this time.
    """
    filled = [
        {"id": name.lower().replace(" ", "_"), "title": name, "blocks": shown}
        for name, blocks in sections.items()
        if (shown := [b for b in blocks if any(map(b.get, ("text", "rows", "lines")))])
    ]
    page = _visible({"title": title, "header": header, "sections": filled})
    words = [page["title"], *map(_as_text, page["header"])]
    for section in page["sections"]:
        words += [f"\n{section['title']}", *map(_as_text, section["blocks"])]
    refresh = f'<meta http-equiv="refresh" content="{refresh_seconds}">'
    file = Path(__file__)
    script = file.with_name("page.js").read_text("utf-8")
    return Template(file.with_name("page.html").read_text("utf-8")).substitute(
        title=html.escape(page["title"]),
        refresh=refresh if refresh_seconds else "",
        style=file.with_name("page.css").read_text("utf-8"),
        text=html.escape("\n".join(words)),
        # Without `<`, no text can end the element or open a comment in it.
        data=json.dumps(page, ensure_ascii=False, allow_nan=False).replace(
            "<", r"\u003c"
        ),
        script=script,
        # The browser runs no other script.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _visible(value: Any) -> Any:
    """A JSON value with escapes in place of control characters."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {key: _visible(each) for key, each in value.items()}
    return [*map(_visible, value)] if isinstance(value, list | tuple) else value


def _as_text(block: Block) -> str:
    """A block for a browser without JavaScript."""
    block = block.get("table", block)
    lines = [block["title"]] * bool(block["title"])
    if "rows" not in block:
        return "\n".join([*lines, block["text"]])
    for row in [block["columns"], *block["rows"]]:
        cells = (cell["text"] if isinstance(cell, dict) else cell for cell in row)
        lines.append("\t".join(cells))
    return "\n".join(lines)
