"""What speculative decoding gained: proposers beside each other, place by place."""

from ..report import format_number
from .charts import Chart, bar_chart

COLUMNS = ("acceptance", "tokens_per_round", "speedup")


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
    shares = proposer.get("acceptance_by_position") or []
    return bar_chart(
        f"{model}-{name}-speculation",
        f"Guesses of {name} that stood",
        "share of those whose predecessors stood",
        [(str(place), share) for place, share in enumerate(shares, 1)],
        across="place of the guess",
        labels=[(place - 0.5, str(place)) for place in range(1, len(shares) + 1)],
        percent=True,
    )
