"""Where a model diverges from its reference: histograms of KL and of agreement."""

from .charts import Chart, bar_chart


def histograms(models: dict[str, dict]) -> dict[str, list[Chart]]:
    """Charts by model, of those that have a reference."""
    found = {
        name: [chart for chart in (_kl(name, f), _agreement(name, f)) if chart]
        for name, f in models.items()
    }
    return {name: charts for name, charts in found.items() if charts}


def _kl(name: str, figures: dict) -> Chart | None:
    histogram = figures.get("kl_histogram") or {}
    edges, counts = histogram.get("edges", []), histogram.get("positions", [])
    return bar_chart(
        f"{name}-kl",
        "KL divergence",
        "positions",
        [(f"{low:.2g} to {high:.2g}", n) for low, high, n in _bins(edges, counts)],
        across="nats, the scale is logarithmic",
        labels=[(i, f"{edge:g}") for i, edge in enumerate(edges) if i % 8 == 0],
    )


def _agreement(name: str, figures: dict) -> Chart | None:
    histogram = figures.get("agreement_by_confidence") or {}
    edges, agreed = histogram.get("edges", []), histogram.get("agreed", [])
    totals = histogram.get("positions", [])
    shares = [a / n if n else None for a, n in zip(agreed, totals, strict=False)]
    return bar_chart(
        f"{name}-agreement",
        "Same most likely token",
        "share of positions",
        [
            (f"{low:.0%} to {high:.0%}", share)
            for low, high, share in _bins(edges, shares)
        ],
        across="probability that the reference gives its token",
        labels=[(i, f"{edge:.0%}") for i, edge in enumerate(edges) if i % 2 == 0],
        percent=True,
    )


def _bins(edges: list, values: list) -> list[tuple]:
    return list(zip(edges, edges[1:], values, strict=False))
