"""The values of a recipe, each by one dotted key."""

import json
from dataclasses import dataclass
from typing import Any

# Keys that say where results go, and are no part of what is tried.
BESIDE = ("output", "tracker")


def recipe_values(data: dict) -> dict[str, Any]:
    """All values of a resolved recipe that say what is tried."""
    return flat({key: value for key, value in data.items() if key not in BESIDE})


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """Values by dotted key, lists of blocks counted from 1, empty blocks kept."""
    if isinstance(value, dict) and value:
        inner = value.items()
    elif isinstance(value, list) and any(isinstance(v, dict | list) for v in value):
        inner = enumerate(value, 1)
    else:
        return {key: value}
    found: dict[str, Any] = {}
    for name, part in inner:
        found |= flat(part, f"{key}.{name}" if key else str(name))
    return found


def one_line(value: Any) -> str:
    """A value as JSON."""
    return json.dumps(value, ensure_ascii=False)


# --- from run.summary: The figures of a run's models as people read them: console, card and page.


@dataclass(frozen=True)
class Metric:
    """One thing measured of a model.

    Attributes:
        path: the keys to its value in a model's entry of report.json.
        form: how a value is written.
        error: those to its standard error, if it has one.
    """

    label: str
    path: tuple[str, ...]
    form: str
    error: tuple[str, ...] = ()
    scale: float = 1.0

    def value(self, figures: dict) -> float | None:
        """The value in its unit; None where it was not measured."""
        found = _look_up(figures, self.path)
        return None if found is None else found * self.scale

    def show(self, figures: dict) -> str:
        """The value as text, with its standard error."""
        value = self.value(figures)
        if value is None:
            return "-"
        error = _look_up(figures, self.error) if self.error else None
        text = self.form.format(value)
        return text if error is None else f"{text} ± {self.form.format(error)}"


METRICS = (
    Metric("perplexity", ("perplexity",), "{:.3f}", ("perplexity_stderr",)),
    Metric("KL to the model before", ("kl_mean",), "{:.4f}", ("kl_stderr",)),
    Metric("KL, 99th percentile", ("kl_p99",), "{:.3f}"),
    Metric("top-1 agreement", ("top1_agreement",), "{:.1%}"),
    Metric("skill accuracy", ("exact_match",), "{:.1%}", ("exact_match_stderr",)),
    Metric("bits per weight", ("bits_per_weight",), "{:.2f}"),
    Metric("size, MB", ("bytes",), "{:.2f}", scale=1e-6),
    Metric("first token, ms", ("generation", "ttft_ms", "p50"), "{:.1f}"),
    Metric(
        "decode, tokens/s", ("generation", "decode_tokens_per_second", "p50"), "{:.0f}"
    ),
)


def metrics_of(models: list[dict]) -> list[Metric]:
    """What can be said of these models, and every metric of the tasks measured."""
    measured = [figures.get("tasks", {}) for figures in models]
    names = {
        (task, metric): None
        for tasks in measured
        for task, scores in tasks.items()
        for metric in scores
        if "_stderr" not in metric
    }
    return [*METRICS, *(_score(task, metric) for task, metric in names)]


def table(models: dict[str, dict]) -> tuple[list[str], list[list[str]]]:
    """Column names and rows of what was measured, one column a model."""
    rows = [
        [figure.label, *(figure.show(figures) for figures in models.values())]
        for figure in metrics_of([*models.values()])
    ]
    return ["", *models], rows


def recovery_table(recovered: dict) -> tuple[list[str], list[list[str]]]:
    """What a training won back of the cost of rounding, as report.json has it."""
    models = [
        recovered.get(name, {}) for name in ("fp_baseline", "fp_baseline_rtn", "qat")
    ]
    rows = []
    for label, name in (("loss", "loss"), ("KL to the FP baseline", "kl")):
        figure = Metric(label, (name,), "{:.4f}", (f"{name}_stderr",))
        share = Metric(label, (name,), "{:.1%}", (f"{name}_stderr",))
        rows.append([label, *map(figure.show, models), share.show(recovered)])
    kept = Metric("", ("gain_retained",), "{:.1%}").show(recovered)
    rows.append(["gain retained after export", "", "", kept, ""])
    return ["", "FP baseline", "FP baseline + RTN", "QAT", "gap recovered"], rows


def _score(task: str, metric: str) -> Metric:
    name, comma, answers = metric.partition(",")
    error = ("tasks", task, f"{name}_stderr{comma}{answers}")
    return Metric(f"{task}: {metric}", ("tasks", task, metric), "{:.3f}", error)


def _look_up(values: dict, path: tuple[str, ...]) -> float | None:
    for key in path:
        values = values.get(key) if isinstance(values, dict) else None
    return values
