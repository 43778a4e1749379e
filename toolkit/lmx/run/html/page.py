"""report.html of a run, the page that compares runs, and curves as SVG."""

from functools import cache
from pathlib import Path

from ..compare import RunSummary, metrics_table, recipe_table
from ..fs import read_metrics, write_atomic
from ..tables import recovery_table, table
from ..terminal import visible
from . import sections
from .charts import Chart, Line, line_chart
from .record import Record

NAME = "report.html"
# Curves in the SVG file. They do not depend on time, so that the file is reproducible.
SVG_CURVES = ("loss", "learning_rate", "gradient_norm")
# A browser loads the page of a running run again after this time.
REFRESH_SECONDS = 10
TEMPLATES = Path(__file__).parent / "templates"


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
    return render("report.html", **_values(Record.read(folder)))


def render(template: str, **values) -> str:
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


def _values(record: Record) -> dict:
    columns, rows = table(record.models)
    gap_recovered = record.report.get("training", {}).get("gap_recovered")
    return {
        "name": record.manifest["name"],
        "status": record.manifest["status"],
        "refresh_seconds": REFRESH_SECONDS,
        "log": [] if record.manifest["status"] in ("done", "running") else record.log,
        "overview": sections.overview(record),
        "thresholds": sections.thresholds(record),
        "models": columns[1:],
        "figures": rows if record.models else [],
        "gap_recovered": gap_recovered and recovery_table(gap_recovered),
        "curves": sections.curves(record.metrics),
        "histograms": sections.histograms(record.models),
        "maps": sections.layer_maps(record.models),
        "speculations": sections.speculations(record.report),
        "side_by_side": record.report.get("samples", []),
        "samples": record.samples,
        "uses": sections.uses(record),
        "reproduces": sections.reproduces(record),
        "recipe": record.recipe,
        "resolved": record.resolved_text,
        "versions": sections.versions(record),
        "hashes": sections.hashes(record),
    }


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
            `sweep_summary.groups_table`.
    """
    charts = [_overlay("valid", "loss", "Validation loss", "nats per token", runs)]
    for key, label, unit in sections.CURVES:
        charts.append(_overlay("train", key, label, unit, runs))
    return render(
        "compare.html",
        title=title or ", ".join(run.name for run in runs),
        groups=groups,
        figures=metrics_table(runs),
        recipes=recipe_table(runs),
        charts=[chart for chart in charts if chart],
    )


def _overlay(
    kind: str, key: str, title: str, unit: str, runs: list[RunSummary]
) -> Chart | None:
    """One curve of the first training stage of every run."""
    lines = []
    for run in runs:
        stages = (r["stage"] for r in run.records if r.get("kind") == "train")
        points = sections.points(run.records, next(stages, None), kind, key)
        lines.append(Line(run.name, points))
    return line_chart(f"{kind}-{key}", title, unit, lines)


def draw_curves(folder: Path, stage: str, target: Path) -> bool:
    """Draw the curves of a stage as SVG; False if it has none.

    The same metrics give the same bytes. null is a gap.

    Args:
        folder: the run directory.

    Raises:
        UserError: the file is not writable.
    """
    charts = sections.curves(read_metrics(folder, stage)).get(stage, [])
    keys = [f"{stage}-{name}" for name in SVG_CURVES]
    charts = [chart for chart in charts if chart.key in keys]
    if charts:
        write_atomic(target, render("curves.svg", stage=stage, charts=charts))
    return bool(charts)
