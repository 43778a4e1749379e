"""The sections of the report page, as plain values, charts and layer maps."""

import math
import re
from dataclasses import dataclass
from datetime import datetime

from ..manifest import TIME_FORMAT
from ..progress import format_duration, format_number
from ..report import LARGEST
from .charts import Chart, Line, bar_chart, line_chart
from .record import Record

STATUS = {
    "running": "running or crashed",
    "done": "done",
    "failed": "failed",
    "interrupted": "interrupted; the same command resumes it",
}


def overview(record: Record) -> list[tuple[str, str]]:
    """Name and value of the summary's rows."""
    facts, source = record.manifest, record.resolved.get("model") or {}
    training = record.report.get("training", {})
    rows = [
        ("Status", STATUS.get(facts["status"], facts["status"])),
        ("Started", (facts.get("started") or "").replace("T", " ")),
        ("Duration", _duration(facts)),
        ("Model", source.get("path") or "from scratch"),
        ("Completed stages", ", ".join(facts.get("stages", {})) or "none yet"),
        ("Steps", _grouped(training.get("steps"))),
        ("Trained tokens", _grouped(training.get("trained_tokens"))),
        ("Trained parameters", _grouped(training.get("trained_parameters"))),
        ("Changed codes", _changed_codes(training)),
        ("Quantization method", training.get("method")),
    ]
    return [(name, value) for name, value in rows if value]


def thresholds(record: Record) -> list[tuple[str, str, str, str]]:
    """Name, value, limit and result of every threshold."""
    rows = []
    for threshold in record.report.get("thresholds", []):
        value = threshold.get("value")
        shown = "not measured" if value is None else f"{value:.4g}"
        result = "passed" if threshold["passed"] else "missed"
        rows.append((threshold["name"], shown, f"{threshold['limit']:g}", result))
    return rows


def versions(record: Record) -> list[tuple[str, str]]:
    """Versions and machine."""
    facts = record.manifest
    rows = [*facts.get("versions", {}).items(), *facts.get("machine", {}).items()]
    return [(name, str(value)) for name, value in rows if value is not None]


def hashes(record: Record) -> list[tuple[str, str]]:
    """SHA-256 of the recipe and of every file that a stage wrote."""
    rows = [("resolved recipe", record.manifest["recipe_hash"])]
    for stage in record.manifest.get("stages", {}).values():
        for folder, files in stage.get("artifacts", {}).items():
            rows += [(f"{folder}/{name}", digest) for name, digest in files.items()]
    return list(dict.fromkeys(rows))


def uses(record: Record) -> list[str]:
    """Commands that use the exported model."""
    model = f"{record.output}/model"
    if "model" not in record.folders:
        return []
    return [
        f'lmx generate {model} --prompt "..."',
        f'mlx_lm.generate --model {model} --prompt "..."',
        f"mlx_lm.server --model {model}",
    ]


def reproduces(record: Record) -> list[str]:
    """Commands that repeat the run, or write this page again."""
    command = record.manifest.get("command")
    again = [f"{command} --restart"] if command else []
    return [*again, f"lmx report {record.output}"]


def _duration(facts: dict) -> str | None:
    start, end = facts.get("started"), facts.get("ended")
    if not start or not end:
        return None
    times = [datetime.strptime(t, TIME_FORMAT) for t in (start, end)]
    return format_duration((times[1] - times[0]).total_seconds())


def _changed_codes(training: dict) -> str | None:
    if "codes" not in training:
        return None
    return f"{training['changed_codes']:,} of {training['codes']:,}"


def _grouped(number: int | None) -> str | None:
    return None if number is None else f"{number:,}"


# Key in metrics.jsonl, title, unit. The loss also has the validation curve.
CURVES = (
    ("loss", "Loss", "nats per token"),
    ("learning_rate", "Learning rate", "per step"),
    ("gradient_norm", "Gradient norm", "before clipping"),
    ("tokens_per_second", "Speed", "trained tokens per second"),
    ("peak_memory_gb", "Peak memory", "GB"),
)


def curves(metrics: list[dict]) -> dict[str, list[Chart]]:
    """Charts by stage, in the order of the run, without stages that have none."""
    stages = dict.fromkeys(row["stage"] for row in metrics)
    by_stage = {stage: _stage_charts(stage, metrics) for stage in stages}
    return {stage: charts for stage, charts in by_stage.items() if charts}


def points(metrics: list[dict], stage: str, kind: str, key: str) -> list[tuple]:
    """Step and value of the records of a kind; None = not a finite number."""
    return [
        (row["step"], row[key])
        for row in metrics
        if row["stage"] == stage
        and row["kind"] == kind
        and _is_shown(row["step"])
        and key in row
        and (row[key] is None or _is_shown(row[key]))
    ]


def _is_shown(value) -> bool:
    """Whether a value is a finite number that charts can show."""
    return isinstance(value, int | float) and abs(value) < LARGEST


def _stage_charts(stage: str, metrics: list[dict]) -> list[Chart]:
    charts = []
    for key, title, unit in CURVES:
        lines = [Line("training", points(metrics, stage, "train", key))]
        if key == "loss":
            lines.append(Line("validation", points(metrics, stage, "valid", key)))
        charts.append(line_chart(f"{stage}-{key}", title, unit, lines))
    return [chart for chart in charts if chart]


def histograms(models: dict[str, dict]) -> dict[str, list[Chart]]:
    """Histograms of KL divergence and agreement, by model with a reference."""
    by_model = {
        name: [chart for chart in (_kl(name, f), _agreement(name, f)) if chart]
        for name, f in models.items()
    }
    return {name: charts for name, charts in by_model.items() if charts}


def _kl(name: str, figures: dict) -> Chart | None:
    histogram = figures.get("kl_histogram") or {}
    edges, counts = histogram.get("edges", []), histogram.get("positions", [])
    return bar_chart(
        f"{name}-kl",
        "KL divergence",
        "positions",
        [(f"{low:.2g} to {high:.2g}", n) for low, high, n in _bins(edges, counts)],
        across="nats (logarithmic)",
        labels=[(i, f"{edge:g}") for i, edge in enumerate(edges) if i % 8 == 0],
    )


def _agreement(name: str, figures: dict) -> Chart | None:
    histogram = figures.get("agreement_by_confidence") or {}
    edges, agreed = histogram.get("edges", []), histogram.get("agreed", [])
    totals = histogram.get("positions", [])
    shares = [a / n if n else None for a, n in zip(agreed, totals, strict=False)]
    return bar_chart(
        f"{name}-agreement",
        "Top-1 agreement",
        "fraction of positions",
        [
            (f"{low:.0%} to {high:.0%}", share)
            for low, high, share in _bins(edges, shares)
        ],
        across="top-1 probability of the reference",
        labels=[(i, f"{edge:.0%}") for i, edge in enumerate(edges) if i % 2 == 0],
        percent=True,
    )


def _bins(edges: list, values: list) -> list[tuple]:
    return list(zip(edges, edges[1:], values, strict=False))


COLUMNS = ("acceptance_rate", "accepted_length", "speedup")


def speculations(report: dict) -> list[dict]:
    """Per model: name, table rows by proposer, and charts by draft position."""
    models = report.get("models", {})
    measured = {name: f.get("speculation") for name, f in models.items()}
    # The benchmark of a draft stage, by sampling and prompt set.
    benchmarks = report.get("speculation")
    measured |= benchmarks if isinstance(benchmarks, dict) else {}
    return [
        {
            "model": model,
            "rows": [[name, *map(_shown, _values(p))] for name, p in proposers.items()],
            "charts": [c for n, p in proposers.items() if (c := _chart(model, n, p))],
        }
        for model, entry in measured.items()
        if (proposers := _proposers(entry))
    ]


def _proposers(entry) -> dict[str, dict]:
    if not isinstance(entry, dict):
        return {}
    return {name: p for name, p in entry.items() if isinstance(p, dict)}


def _values(proposer: dict) -> list[float | None]:
    return [proposer.get(column) for column in COLUMNS]


def _shown(value: float | None) -> str:
    return "-" if value is None else format_number(value)


def _chart(model: str, name: str, proposer: dict) -> Chart | None:
    shares = proposer.get("acceptance_rate_by_position") or []
    return bar_chart(
        f"{model}-{name}-speculation",
        f"Acceptance rate by position, {name}",
        "fraction, given that earlier draft tokens are accepted",
        [(str(place), share) for place, share in enumerate(shares, 1)],
        across="draft position",
        labels=[(place - 0.5, str(place)) for place in range(1, len(shares) + 1)],
        percent=True,
    )


BLOCK_PATH = re.compile(r"^.*?\.(\d+)\.(.+)$")
SHADES = 6
# Signal-to-error ratio of the lightest shade; each darker shade has 5 dB less.
LIGHTEST_DECIBELS = 30
BITS = "Bits / group size. Darker cells have more bits."
ERROR = (
    "Squared error of the weights in % of their squared norm. "
    "Darker cells have a larger error."
)


@dataclass(frozen=True)
class Cell:
    """One layer. The shade, 0 to 5, shows its bits or its error."""

    path: str
    text: str
    shade: int


@dataclass(frozen=True)
class LayerMap:
    """Cells by block and layer name; None = the block has no such layer.

    Attributes:
        outside: cells of the non-block layers.
    """

    title: str
    note: str
    kinds: list[str]
    blocks: list[tuple[int, list[Cell | None]]]
    outside: list[Cell]


def layer_maps(models: dict[str, dict]) -> dict[str, list[LayerMap]]:
    """The maps of every model with measured layers, by its name."""
    by_model = {}
    for name, figures in models.items():
        if layers := figures.get("layers"):
            maps = [_map("Bits per layer", BITS, layers, _bits)]
            if any(layer.get("error") is not None for layer in layers.values()):
                maps.append(_map("Relative weight error", ERROR, layers, _error))
            by_model[name] = maps
    return by_model


def _map(title: str, note: str, layers: dict[str, dict], cell) -> LayerMap:
    matches = {path: BLOCK_PATH.match(path) for path in layers}
    kinds = sorted({m[2] for m in matches.values() if m})
    numbers = sorted({int(m[1]) for m in matches.values() if m})
    cells = {path: cell(path, layer) for path, layer in layers.items()}
    by_position = {(int(m[1]), m[2]): cells[path] for path, m in matches.items() if m}
    return LayerMap(
        title=title,
        note=note,
        kinds=kinds,
        blocks=[(n, [by_position.get((n, kind)) for kind in kinds]) for n in numbers],
        outside=[cells[path] for path, m in matches.items() if not m],
    )


def _bits(path: str, layer: dict) -> Cell:
    bits = layer.get("bits")
    if bits is None:
        return Cell(path, "-", 0)
    group = layer.get("group_size")
    # 2, 3, 4, 5, 6 and more.
    return Cell(path, f"{bits}/{group}" if group else f"{bits}", min(bits - 2, 5))


def _error(path: str, layer: dict) -> Cell:
    error = layer.get("error")
    if error is None:
        return Cell(path, "-", 0)
    decibels = -10 * math.log10(error) if error > 0 else math.inf
    shade = math.ceil((LIGHTEST_DECIBELS - min(decibels, LIGHTEST_DECIBELS)) / 5)
    return Cell(path, f"{100 * error:.2g}", min(shade, SHADES - 1))
