"""report.html of a run, and the page that compares runs."""

import math
import re
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..compare import RunSummary, TableCells, metrics_table, recipe_table
from ..fs import write_atomic
from ..manifest import TIME_FORMAT
from ..progress import format_duration, format_number
from ..report import LARGEST, Record
from ..tables import recovery_table, table
from ..terminal import visible
from .charts import Chart, Point, line_chart

NAME = "report.html"
# A browser loads the page of a running run again after this time.
REFRESH_SECONDS = 10
TEMPLATES = Path(__file__).parent / "templates"
STATUS = {
    "running": "running or crashed",
    "interrupted": "interrupted; the same command resumes it",
}
# Key in metrics.jsonl, title, unit. The loss also has the validation curve.
CURVES = (
    ("loss", "Loss", "nats per token"),
    ("learning_rate", "Learning rate", "per step"),
    ("gradient_norm", "Gradient norm", "before clipping"),
    ("tokens_per_second", "Speed", "trained tokens per second"),
    ("peak_memory_gb", "Peak memory", "GB"),
)
# Of draft models, whose best weights are selected by it.
ACCEPTED_LENGTH = ("accepted_length_all", "Accepted length", "tokens per round")
SPECULATION = ("acceptance_rate", "accepted_length", "speedup")


BLOCK_PATH = re.compile(r"^.*?\.(\d+)\.(.+)$")
SHADES = 6
# Signal-to-error ratio of the lightest shade; each darker shade has 5 dB less.
LIGHTEST_DECIBELS = 30
BITS = "Bits / group size. Darker cells have more bits."
ERROR = (
    "Squared error of the weights in % of their squared norm. "
    "Darker cells have a larger error."
)


def write_page(folder: Path) -> Path:
    """Write report.html of a run directory, finished or not; returns its path.

    Raises:
        UserError: this is not a run directory, or a file is damaged or not writable.
    """
    target = folder / NAME
    # A damaged file may hold half of a surrogate pair.
    write_atomic(target, page(folder).encode(errors="replace"))
    return target


def page(folder: Path) -> str:
    """The page of a run directory; see `write_page`."""
    record = Record.read(folder)
    columns, rows = table(record.models)
    gap_recovered = record.report.get("training", {}).get("gap_recovered")
    status, command = record.manifest["status"], record.manifest["command"]
    again = [f"{command} --restart"] if command else []
    facts = record.manifest["versions"] | record.manifest["machine"]
    return render(
        "report.html",
        record=record,
        status=status,
        refresh_seconds=REFRESH_SECONDS,
        log=[] if status in ("done", "running") else record.log,
        overview=_overview(record),
        models=columns[1:],
        figures=rows if record.models else [],
        gap_recovered=gap_recovered and recovery_table(gap_recovered),
        curves=_curves(record.metrics),
        maps=layer_maps(record.models),
        speculations=_speculations(record.report),
        uses=_uses(record),
        reproduces=[*again, f"lmx report {record.output}"],
        versions=[(k, str(value)) for k, value in facts.items() if value is not None],
        hashes=_hashes(record.manifest),
    )


def comparison_page(
    runs: list[RunSummary],
    *,
    title: str | None = None,
    groups: tuple[str, list[str], list[list[str]]] | None = None,
) -> str:
    """The page of `lmx compare`, with the curves of all runs in the same charts.

    Args:
        title: None = the names of the runs.
        groups: title, columns and rows of a table over groups of runs; see
            `compare.groups_table`.
    """
    curves = [("valid", "loss", "Validation loss", "nats per token")]
    curves += [("train", *curve) for curve in CURVES]
    charts = []
    for kind, key, label, unit in curves:
        lines = {run.name: _first_stage(run.records, kind, key) for run in runs}
        charts.append(line_chart(f"{kind}-{key}", label, unit, lines))
    return render(
        "compare.html",
        title=title or ", ".join(run.name for run in runs),
        groups=groups,
        figures=metrics_table(runs),
        recipes=recipe_table(runs),
        charts=[*filter(None, charts)],
    )


def render(template: str, **values: Any) -> str:
    """Fill a template; all values are escaped, control characters too."""
    return _environment().get_template(template).render(**values)


@cache
def _environment():
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=lambda value: visible(value) if isinstance(value, str) else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _overview(record: Record) -> TableCells:
    """Name and value of the summary's rows."""
    facts, training = record.manifest, record.report.get("training", {})
    start, end = facts["started"], facts["ended"]
    rows: list[tuple[str, str | None]] = [
        ("Status", STATUS.get(facts["status"], facts["status"])),
        ("Started", start.replace("T", " ")),
        ("Duration", _duration(start, end) if end else None),
        ("Model", (record.resolved.get("model") or {}).get("path") or "from scratch"),
        ("Completed stages", ", ".join(facts["stages"]) or "none yet"),
    ]
    for key in ("steps", "trained_tokens", "trained_parameters"):
        count = training.get(key)
        shown = None if count is None else f"{count:,}"
        rows.append((key.replace("_", " ").capitalize(), shown))
    changed, codes = training.get("changed_codes"), training.get("codes")
    if changed is not None and codes is not None:
        rows.append(("Changed codes", f"{changed:,} of {codes:,}"))
    rows.append(("Quantization method", training.get("method")))
    return [(name, value) for name, value in rows if value]


def _duration(start: str, end: str) -> str:
    times = [datetime.strptime(text, TIME_FORMAT) for text in (start, end)]
    return format_duration((times[1] - times[0]).total_seconds())


def _hashes(manifest: dict) -> list[tuple[str, str]]:
    """SHA-256 of the recipe and of every file that a stage wrote."""
    rows = {"resolved recipe": manifest["recipe_hash"]}
    for stage in manifest["stages"].values():
        for folder, files in stage["artifacts"].items():
            rows |= {f"{folder}/{name}": digest for name, digest in files.items()}
    return [*rows.items()]


def _uses(record: Record) -> list[str]:
    """Commands that use the exported model."""
    model = f"{record.output}/model"
    if "model" not in record.folders:
        return []
    return [
        f'lmx generate {model} --prompt "..."',
        f'mlx_lm.generate --model {model} --prompt "..."',
        f"mlx_lm.server --model {model}",
    ]


def _curves(metrics: list[dict]) -> dict[str, list[Chart]]:
    """Charts by stage, in the order of the run, without stages that have none."""
    by_stage = {}
    for stage in dict.fromkeys(row["stage"] for row in metrics):
        charts = []
        for key, title, unit in CURVES:
            lines = {"training": _points(metrics, stage, "train", key)}
            if key == "loss":
                lines["validation"] = _points(metrics, stage, "valid", key)
            charts.append(line_chart(f"{stage}-{key}", title, unit, lines))
        key, title, unit = ACCEPTED_LENGTH
        lines = {"held-out prompts": _points(metrics, stage, "draft", key)}
        charts.insert(1, line_chart(f"{stage}-{key}", title, unit, lines))
        by_stage[stage] = [*filter(None, charts)]
    return {stage: charts for stage, charts in by_stage.items() if charts}


def _first_stage(records: list[dict], kind: str, key: str) -> list[Point]:
    """A curve of the first training stage of a run."""
    stages = (row["stage"] for row in records if row["kind"] == "train")
    return _points(records, next(stages, None), kind, key)


def _points(records: list[dict], stage: str | None, kind: str, key: str) -> list[Point]:
    """Step and value of the records of a kind; None = not a finite number."""
    return [
        (row["step"], row[key])
        for row in records
        if (row["stage"], row["kind"]) == (stage, kind)
        and _is_shown(row["step"])
        and key in row
        and (row[key] is None or _is_shown(row[key]))
    ]


def _is_shown(value) -> bool:
    """Whether a value is a finite number that charts can show."""
    return isinstance(value, int | float) and abs(value) < LARGEST


def _speculations(report: dict) -> dict[str, list[list[str]]]:
    """Table rows by model: how each proposer speeds up decoding."""
    models = report.get("models", {}).items()
    measured = {name: figures.get("speculation") for name, figures in models}
    # The benchmark of a draft stage, by sampling and prompt set.
    measured |= report.get("speculation", {})
    tables = {}
    for model, proposers in measured.items():
        for name, facts in (proposers or {}).items():
            values = [facts.get(key) for key in SPECULATION]
            shown = ["-" if v is None else format_number(v) for v in values]
            tables.setdefault(model, []).append([name, *shown])
    return tables


class Cell(NamedTuple):
    """One layer. The shade, 0 to 5, shows its bits or its error."""

    path: str
    text: str
    shade: int


class LayerMap(NamedTuple):
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
    inside, outside = {}, []
    for path, layer in layers.items():
        drawn = Cell(path, *cell(layer))
        if match := BLOCK_PATH.match(path):
            inside[int(match[1]), match[2]] = drawn
        else:
            outside.append(drawn)
    kinds = sorted({kind for _, kind in inside})
    numbers = sorted({number for number, _ in inside})
    blocks = [(n, [inside.get((n, kind)) for kind in kinds]) for n in numbers]
    return LayerMap(title, note, kinds, blocks, outside)


def _bits(layer: dict) -> tuple[str, int]:
    bits, group = layer.get("bits"), layer.get("group_size")
    if bits is None:
        return "-", 0
    # 2, 3, 4, 5, 6 and more.
    return f"{bits}/{group}" if group else f"{bits}", min(bits - 2, SHADES - 1)


def _error(layer: dict) -> tuple[str, int]:
    error = layer.get("error")
    if error is None:
        return "-", 0
    decibels = -10 * math.log10(error) if error > 0 else math.inf
    shade = math.ceil((LIGHTEST_DECIBELS - min(decibels, LIGHTEST_DECIBELS)) / 5)
    return f"{100 * error:.2g}", min(shade, SHADES - 1)
