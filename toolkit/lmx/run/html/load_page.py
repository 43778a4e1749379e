"""The page of `lmx bench --load`: a table, and charts over the load."""

from collections.abc import Sequence

from .charts import Chart, line_chart
from .page import render

KINDS = {"rate": "requests a second", "concurrency": "clients"}
CURVES = {
    "ttft_ms": ("Time to first token", "ms"),
    "inter_token_ms": ("Time between tokens", "ms"),
}
RATES = {
    "output_tokens_per_second": ("Throughput", "tokens a second"),
    "goodput": ("Goodput", "share of requests within the limits"),
}


def load_page(
    url: str, model: str, rows: Sequence[dict], table: tuple[list, list]
) -> str:
    """The page as HTML.

    Args:
        rows: those of `server_load.measure_load`.
        table: columns, and the cells of every row.
    """
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    charts = {
        KINDS[kind]: _charts(kind, [r for r in rows if r["kind"] == kind])
        for kind in kinds
    }
    return render(
        "load.html",
        title=f"{model} under load",
        url=url,
        table=table,
        charts=charts,
    )


def _charts(kind: str, rows: Sequence[dict]) -> list[Chart]:
    charts = []
    for key, (title, unit) in CURVES.items():
        names = rows[0][key]
        lines = {n: [(r["load"], r[key][n]) for r in rows] for n in names}
        charts.append(line_chart(f"{kind}-{key}", title, unit, lines, across="load"))
    for key, (title, unit) in RATES.items():
        lines = {title: [(r["load"], r[key]) for r in rows]}
        charts.append(line_chart(f"{kind}-{key}", title, unit, lines, across="load"))
    return [chart for chart in charts if chart]
