"""What a run says of itself: how it ended, versions, hashes, commands."""

from datetime import datetime

from ..logger import format_duration, format_number
from .charts import Chart, bar_chart
from .record import Record

STATUS = {
    "running": "running, or ended without a goodbye",
    "done": "done",
    "failed": "failed",
    "interrupted": "interrupted; the same command goes on",
}


def overview(record: Record) -> list[tuple[str, str]]:
    """Name and value of what matters first."""
    facts, source = record.manifest, record.resolved.get("model") or {}
    training = record.report.get("training", {})
    rows = [
        ("Status", STATUS.get(facts["status"], facts["status"])),
        ("Started", (facts.get("started") or "").replace("T", " ")),
        ("Took", _duration(facts)),
        ("Model", source.get("path") or "fresh"),
        ("Stages done", ", ".join(facts.get("stages", {})) or "none yet"),
        ("Steps", _grouped(training.get("steps"))),
        ("Trained tokens", _grouped(training.get("trained_tokens"))),
        ("Trained parameters", _grouped(training.get("trained_parameters"))),
        ("Quantized with", training.get("method")),
    ]
    return [(name, value) for name, value in rows if value]


def thresholds(record: Record) -> list[tuple[str, str, str, str]]:
    """Name, value, limit and verdict of every gate."""
    return [
        (
            threshold["name"],
            "not measured"
            if threshold.get("value") is None
            else f"{threshold['value']:.4g}",
            f"{threshold['limit']:g}",
            "passed" if threshold["passed"] else "missed",
        )
        for threshold in record.report.get("thresholds", [])
    ]


def versions(record: Record) -> list[tuple[str, str]]:
    """Versions and machine."""
    facts = record.manifest
    rows = [*facts.get("versions", {}).items(), *facts.get("machine", {}).items()]
    return [(name, str(value)) for name, value in rows if value is not None]


def hashes(record: Record) -> list[tuple[str, str]]:
    """Sha256 of the recipe and of every file that a stage left."""
    rows = [("resolved recipe", record.manifest["recipe_hash"])]
    for stage in record.manifest.get("stages", {}).values():
        for folder, files in stage.get("artefacts", {}).items():
            rows += [(f"{folder}/{name}", digest) for name, digest in files.items()]
    return list(dict.fromkeys(rows))


def uses(record: Record) -> list[str]:
    """Commands that use what the run has published."""
    model = f"{record.output}/model"
    if "model" not in record.folders:
        return []
    return [
        f'lmx generate {model} --prompt "..."',
        f'mlx_lm.generate --model {model} --prompt "..."',
        f"mlx_lm.server --model {model}",
    ]


def reproduces(record: Record) -> list[str]:
    """Commands that make the run, setting this one aside, or this page again."""
    command = record.manifest.get("command")
    again = [f"{command} --restart"] if command else []
    return [*again, f"lmx report {record.output}"]


def _duration(facts: dict) -> str | None:
    start, end = facts.get("started"), facts.get("ended")
    if not start or not end:
        return None
    times = [datetime.strptime(t, "%Y-%m-%dT%H:%M:%S%z") for t in (start, end)]
    return format_duration((times[1] - times[0]).total_seconds())


def _grouped(number: int | None) -> str | None:
    return None if number is None else f"{number:,}"


# --- from run.page.histograms: Where a model diverges from its reference: histograms of KL and of agreement.


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


# --- from run.page.speculation: What speculative decoding gained: proposers beside each other, place by place.


COLUMNS = ("acceptance_rate", "accepted_length", "speedup")


def speculations(report: dict) -> list[dict]:
    """One entry a model: its name, the rows of a table, and charts by position."""
    models = report.get("models", {})
    found = {name: f.get("speculation") for name, f in models.items()}
    # Of a draft on trial, by how answers were drawn and what was written.
    trials = report.get("speculation")
    found |= trials if isinstance(trials, dict) else {}
    return [
        {
            "model": model,
            "rows": [[name, *map(_shown, _values(p))] for name, p in proposers.items()],
            "charts": [c for n, p in proposers.items() if (c := _chart(model, n, p))],
        }
        for model, given in found.items()
        if (proposers := _proposers(given))
    ]


def _proposers(given) -> dict[str, dict]:
    if not isinstance(given, dict):
        return {}
    return {name: p for name, p in given.items() if isinstance(p, dict)}


def _values(proposer: dict) -> list[float | None]:
    return [proposer.get(column) for column in COLUMNS]


def _shown(value: float | None) -> str:
    return "-" if value is None else format_number(value)


def _chart(model: str, name: str, proposer: dict) -> Chart | None:
    shares = proposer.get("acceptance_rate_by_position") or []
    return bar_chart(
        f"{model}-{name}-speculation",
        f"Guesses of {name} that stood",
        "share of those whose predecessors stood",
        [(str(place), share) for place, share in enumerate(shares, 1)],
        across="place of the guess",
        labels=[(place - 0.5, str(place)) for place in range(1, len(shares) + 1)],
        percent=True,
    )
