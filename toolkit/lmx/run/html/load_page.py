"""The page of `lmx bench --load`: a table, and charts over the load."""

from collections.abc import Sequence

from .blocks import line_chart, render, table

KINDS = {"rate": "requests a second", "concurrency": "clients"}
# Values of a row, of which the first two have percentiles.
CURVES = {
    "ttft_ms": ("Time to first token", "ms"),
    "inter_token_ms": ("Time between tokens", "ms"),
    "output_tokens_per_second": ("Throughput", "tokens a second"),
    "goodput": ("Goodput", "share of requests within the limits"),
}


def load_page(
    url: str, model: str, rows: Sequence[dict], cells: tuple[list, list]
) -> str:
    """The page as HTML.

    Args:
        rows: those of `server_load.measure_load`.
        cells: columns, and the cells of every row.
    """
    sections = {"Loads": [table("Latency and throughput by load", *cells)]}
    for kind, name in KINDS.items():
        charts, shown = [], [row for row in rows if row["kind"] == kind]
        for key, (title, unit) in CURVES.items():
            lines = {}
            for row in shown:
                values = row[key] if isinstance(row[key], dict) else {title: row[key]}
                for line, value in values.items():
                    lines.setdefault(line, []).append((row["load"], value))
            charts.append(line_chart(title, unit, lines, across="load"))
        sections[f"By {name}"] = charts
    server = table("Summary", [], [["Server", url]], "facts")
    return render(f"{model} under load", [server], sections)
