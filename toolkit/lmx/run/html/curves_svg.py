"""The curves of a training as a picture of their own, those of the page."""

from pathlib import Path

from ..fs import write_atomic
from ..metrics_file import rows_of
from .curves import curves
from .page import render

# The clock has no part in these: the same training is the same picture.
DRAWN = ("loss", "learning_rate", "gradient_norm")


def draw_curves(folder: Path, stage: str, target: Path) -> bool:
    """Draw a stage's rows of metrics.jsonl as SVG; False when there is nothing to draw.

    The same rows give the same bytes. What is null leaves a gap.

    Args:
        folder: the run folder.

    Raises:
        UserError: the disk refuses.
    """
    found = curves(rows_of(folder, stage)).get(stage, [])
    keys = [f"{stage}-{name}" for name in DRAWN]
    charts = [chart for chart in found if chart.key in keys]
    if charts:
        write_atomic(target, render("curves.svg", stage=stage, charts=charts))
    return bool(charts)
