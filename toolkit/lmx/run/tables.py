"""Recipe values by dotted key, and metrics as table rows for log, card and page."""

import json
from dataclasses import dataclass
from typing import Any

# Keys that do not change the result.
KEYS_WITHOUT_EFFECT = ("output", "parallel", "tracker")


def recipe_values(data: dict) -> dict[str, Any]:
    """All values of a resolved recipe that affect the result."""
    return flatten(
        {key: value for key, value in data.items() if key not in KEYS_WITHOUT_EFFECT}
    )


def flatten(value: Any, key: str = "") -> dict[str, Any]:
    """Values by dotted key. Lists of blocks count from 1; empty blocks stay."""
    if isinstance(value, dict) and value:
        inner = value.items()
    elif isinstance(value, list) and any(isinstance(v, dict | list) for v in value):
        inner = enumerate(value, 1)
    else:
        return {key: value}
    values: dict[str, Any] = {}
    for name, item in inner:
        values |= flatten(item, f"{key}.{name}" if key else str(name))
    return values


def one_line(value: Any) -> str:
    """A value as JSON."""
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class Metric:
    """A metric of a model.

    Attributes:
        path: keys of the value in the model's entry of report.json.
        form: format string of the value.
        error: keys of the standard error, if there is one.
        scale: factor from the stored value to the shown unit.
    """

    label: str
    path: tuple[str, ...]
    form: str
    error: tuple[str, ...] = ()
    scale: float = 1.0

    def value(self, figures: dict) -> float | None:
        """The value in the shown unit; None = not measured."""
        value = _look_up(figures, self.path)
        return None if value is None else value * self.scale

    def show(self, figures: dict) -> str:
        """The value as text, with its standard error."""
        value = self.value(figures)
        if value is None:
            return "-"
        error = _look_up(figures, self.error) if self.error else None
        text = self.form.format(value)
        return text if error is None else f"{text} ± {self.form.format(error)}"


METRICS = (
    # Of the runs of a sweep.
    Metric("validation loss", ("validation_loss",), "{:.4f}"),
    Metric("perplexity", ("perplexity",), "{:.3f}", ("perplexity_stderr",)),
    # Paired errors: both models saw the same examples.
    Metric(
        "perplexity ratio",
        ("perplexity_ratio",),
        "{:.3f}",
        ("perplexity_ratio_stderr",),
    ),
    Metric("KL vs. reference", ("kl_mean",), "{:.4f}", ("kl_stderr",)),
    Metric("KL p99", ("kl_p99",), "{:.3f}"),
    Metric("top-1 agreement", ("top1_agreement",), "{:.1%}"),
    Metric("exact match", ("exact_match",), "{:.1%}", ("exact_match_stderr",)),
    Metric(
        "exact match change",
        ("exact_match_change",),
        "{:.1%}",
        ("exact_match_change_stderr",),
    ),
    Metric("bits per weight", ("bits_per_weight",), "{:.2f}"),
    Metric("size, MB", ("bytes",), "{:.2f}", scale=1e-6),
    Metric("TTFT (ms)", ("generation", "ttft_ms", "p50"), "{:.1f}"),
    Metric(
        "decode, tokens/s", ("generation", "decode_tokens_per_second", "p50"), "{:.0f}"
    ),
    Metric(
        "KL, activations not quantized",
        ("kl_mean_weights_only",),
        "{:.4f}",
        ("kl_stderr_weights_only",),
    ),
)


def metrics_of(models: list[dict]) -> list[Metric]:
    """The measured metrics: standard, of the evaluated tasks, and the caller's own."""
    measured = [figures.get("tasks", {}) for figures in models]
    names = {
        (task, metric): None
        for tasks in measured
        for task, scores in tasks.items()
        for metric in scores
        if "_stderr" not in metric
    }
    custom = dict.fromkeys(n for figures in models for n in figures.get("custom", {}))
    metrics = [
        *METRICS,
        *(_score(task, metric) for task, metric in names),
        *(Metric(name, ("custom", name), "{:.4g}") for name in custom),
    ]
    return [m for m in metrics if any(m.value(each) is not None for each in models)]


def table(models: dict[str, dict]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the measured metrics, one column per model."""
    entries = [*models.values()]
    rows = [
        [metric.label, *(metric.show(figures) for figures in entries)]
        for metric in metrics_of(entries)
    ]
    return ["", *models], rows


def aligned(rows: list[list[str]]) -> list[str]:
    """Rows of cells as lines of text. Only the first column is left-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def recovery_table(recovered: dict) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of `gap_recovered` in report.json."""
    models = [
        recovered.get(name, {}) for name in ("fp_baseline", "fp_baseline_rtn", "qat")
    ]
    rows = []
    for label, name in (("loss", "loss"), ("KL to the FP baseline", "kl")):
        metric = Metric(label, (name,), "{:.4f}", (f"{name}_stderr",))
        fraction = Metric(label, (name,), "{:.1%}", (f"{name}_stderr",))
        rows.append([label, *map(metric.show, models), fraction.show(recovered)])
    retained = Metric("", ("gain_retained",), "{:.1%}").show(recovered)
    rows.append(["gain retained after export", "", "", retained, ""])
    return ["", "FP baseline", "FP baseline + RTN", "QAT", "gap recovered"], rows


def _score(task: str, metric: str) -> Metric:
    name, comma, filters = metric.partition(",")
    error = ("tasks", task, f"{name}_stderr{comma}{filters}")
    return Metric(f"{task}: {metric}", ("tasks", task, metric), "{:.3f}", error)


def _look_up(values: dict, path: tuple[str, ...]) -> float | None:
    for key in path:
        values = values.get(key) if isinstance(values, dict) else None
    return values
