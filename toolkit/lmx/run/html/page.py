"""Put the page together."""

from functools import cache
from pathlib import Path

from ..fs import write_atomic
from ..tables import recovery_table, table
from . import sections
from .curves import curves
from .layer_map import layer_maps
from .record import Record
from .sections import histograms, speculations

NAME = "report.html"
TEMPLATES = Path(__file__).parent / "templates"


def write_page(folder: Path) -> Path:
    """Write report.html of a run folder, with what is known so far; returns its path.

    Raises:
        UserError: this is no run folder, a file is damaged, or the disk refuses.
    """
    target = folder / NAME
    write_atomic(target, page(folder))
    return target


def page(folder: Path) -> str:
    """The page of a run folder; see `write_page`."""
    return render("report.html", **_values(Record.read(folder)))


def render(template: str, **values) -> str:
    """Fill a template; whatever goes into it is escaped."""
    return _environment().get_template(template).render(**values)


@cache
def _environment():
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
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
        "log": [] if record.manifest["status"] in ("done", "running") else record.log,
        "overview": sections.overview(record),
        "thresholds": sections.thresholds(record),
        "models": columns[1:],
        "figures": rows if record.models else [],
        "gap_recovered": gap_recovered and recovery_table(gap_recovered),
        "curves": curves(record.metrics),
        "histograms": histograms(record.models),
        "maps": layer_maps(record.models),
        "speculations": speculations(record.report),
        "side_by_side": record.report.get("samples", []),
        "samples": record.samples,
        "uses": sections.uses(record),
        "reproduces": sections.reproduces(record),
        "recipe": record.recipe,
        "resolved": record.resolved_text,
        "versions": sections.versions(record),
        "hashes": sections.hashes(record),
    }
