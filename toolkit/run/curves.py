"""The curves of a training: losses over the learning rate, as a picture."""

import io
from pathlib import Path

from .files import write_atomic
from .rows import rows_of

# Up to so many points each has a mark; one alone would not be seen otherwise.
MARKED = 50


def draw_curves(folder: Path, stage: str, target: Path) -> bool:
    """Draw a stage's rows of metrics.jsonl as SVG; False when there are none.

    The same rows give the same bytes. What is null leaves a gap.

    Args:
        folder: the run folder.

    Raises:
        UserError: the disk refuses.
    """
    rows = rows_of(folder, stage)
    train = [row for row in rows if row["kind"] == "train"]
    valid = [row for row in rows if row["kind"] == "valid"]
    if not rows:
        return False
    import matplotlib
    from matplotlib.figure import Figure

    # Text stays text, and ids do not change from one drawing to the next.
    with matplotlib.rc_context({"svg.hashsalt": "lmx", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 6), layout="constrained")
        losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        _line(losses, train, "loss", "training loss")
        _line(losses, valid, "loss", "validation loss")
        _line(rates, train, "learning_rate", "learning rate")
        losses.set(title=stage, ylabel="nats per token")
        losses.legend()
        rates.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
        for axes in (losses, rates):
            axes.grid(alpha=0.3)
        picture = io.BytesIO()
        figure.savefig(picture, format="svg", metadata={"Date": None})
    write_atomic(target, picture.getvalue())
    return True


def _line(axes, rows: list[dict], key: str, label: str) -> None:
    steps = [row["step"] for row in rows]
    values = [float("nan") if row[key] is None else row[key] for row in rows]
    marker = "." if len(rows) <= MARKED else None
    axes.plot(steps, values, marker=marker, label=label, gid=label.replace(" ", "-"))
