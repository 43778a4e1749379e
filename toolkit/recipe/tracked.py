"""The tracker that a recipe names, open while its stages run."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ..run.report import Report
from ..run.tracking import Tracking
from . import places
from .loader import Loaded
from .schema import TRACKERS


@contextmanager
def tracked(loaded: Loaded, report: Report) -> Iterator[None]:
    """Send the report's rows to the recipe's tracker, if it names one."""
    if (config := loaded.recipe.tracker) is None:
        yield
        return
    start = partial(
        TRACKERS[config.type].start,
        config,
        folder=report.folder,
        name=loaded.name,
        recipe=places.read(loaded.resolved).data,
    )
    report.tracking = Tracking(start, report.warn)
    code = 1
    try:
        yield
        code = 0
    finally:
        report.tracking.finish(_summary(report.folder / "report.json"), code)


def _summary(path: Path) -> dict[str, float]:
    """The figures of every model measured; none if nothing was."""
    models = json.loads(path.read_text())["models"] if path.exists() else {}
    return {
        f"{name}/{key}": value
        for name, figures in models.items()
        for key, value in figures.items()
        if isinstance(value, int | float)
    }
