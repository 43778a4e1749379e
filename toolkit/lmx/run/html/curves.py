"""The curves of every stage that trained."""

from .charts import Chart, Line, line_chart

# Key of a row, title, unit; the loss has the validations' beside it.
CURVES = (
    ("loss", "Loss", "nats per token"),
    ("learning_rate", "Learning rate", "of a step"),
    ("gradient_norm", "Gradient norm", "before clipping"),
    ("tokens_per_second", "Speed", "trained tokens per second"),
    ("peak_memory_gb", "Peak memory", "GB"),
)


def curves(metrics: list[dict]) -> dict[str, list[Chart]]:
    """Charts by stage, in the order of the run; stages without any are left out."""
    stages = dict.fromkeys(row["stage"] for row in metrics if "stage" in row)
    found = {stage: _of_stage(stage, metrics) for stage in stages}
    return {stage: charts for stage, charts in found.items() if charts}


def points(metrics: list[dict], stage: str, kind: str, key: str) -> list[tuple]:
    """Step and value of the rows of a kind, None where it was not a number."""
    return [
        (row["step"], row[key])
        for row in metrics
        if row.get("stage") == stage
        and row.get("kind") == kind
        and "step" in row
        and key in row
    ]


def _of_stage(stage: str, metrics: list[dict]) -> list[Chart]:
    charts = []
    for key, title, unit in CURVES:
        lines = [Line("training", points(metrics, stage, "train", key))]
        if key == "loss":
            lines.append(Line("validation", points(metrics, stage, "valid", key)))
        charts.append(line_chart(f"{stage}-{key}", title, unit, lines))
    return [chart for chart in charts if chart]
