"""Recipe values by dotted key, and metrics as table rows for log, card and page."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# Columns and rows.
TableCells = tuple[list[str], list[list[str]]]
ABSENT = "-"
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
        key: of the value in the model's entry of report.json.
        form: format of the value.
        error: key of the standard error, if there is one.
        block: keys of the block of the entry that has the value and its error.
        scale: factor from the stored value to the shown unit.
    """

    label: str
    key: str
    form: str
    error: str = ""
    block: tuple[str, ...] = ()
    scale: float = 1.0

    def values(self, figures: dict) -> tuple[float | None, float | None]:
        """The value in the shown unit and its standard error; None = not measured."""
        for key in self.block:
            figures = figures.get(key) or {}
        value = figures.get(self.key)
        return None if value is None else value * self.scale, figures.get(self.error)

    def show(self, value: float | None, error: float | None = None) -> str:
        """A value and its standard error as text."""
        if value is None:
            return ABSENT
        text = format(value, self.form)
        return text if error is None else f"{text} ± {error:{self.form}}"


DECODED = "decode_tokens_per_second"
KL_WEIGHTS_ONLY = "KL, activations not quantized"
CHANGE = "exact_match_change"
SKILLS, FIELDS = "exact_match_by_skill", "exact_match_by_field"
# More skills have their rates in report.json alone.
MAX_SKILL_ROWS = 4
METRICS = (
    # Of the runs of a sweep.
    Metric("validation loss", "validation_loss", ".4f"),
    Metric("perplexity", "perplexity", ".3f", "perplexity_stderr"),
    # Paired errors: both models saw the same examples.
    Metric("perplexity ratio", "perplexity_ratio", ".3f", "perplexity_ratio_stderr"),
    Metric("KL vs. reference", "kl_mean", ".4f", "kl_stderr"),
    Metric("KL p99", "kl_p99", ".3f"),
    Metric("top-1 agreement", "top1_agreement", ".1%"),
    Metric("exact match", "exact_match", ".1%", "exact_match_stderr"),
    Metric("exact match change", CHANGE, ".1%", f"{CHANGE}_stderr"),
    Metric("bits per weight", "bits_per_weight", ".2f"),
    Metric("size, MB", "bytes", ".2f", scale=1e-6),
    Metric("TTFT (ms)", "p50", ".1f", block=("generation", "ttft_ms")),
    Metric("decode, tokens/s", "p50", ".0f", block=("generation", DECODED)),
    Metric(KL_WEIGHTS_ONLY, "kl_mean_weights_only", ".4f", "kl_stderr_weights_only"),
)


def metrics_of(models: Iterable[dict]) -> list[Metric]:
    """The measured metrics: standard, of the evaluated tasks, and the caller's own."""
    models, found = [*models], dict[Metric, None]()
    # Where the last model has all answers right, skills and fields say nothing more.
    last = {} if not models or models[-1].get("exact_match") == 1 else models[-1]
    parts = {key: last.get(key, {}) for key in (SKILLS, FIELDS)}
    if not 1 < len(parts[SKILLS]) <= MAX_SKILL_ROWS:
        del parts[SKILLS]
    for metric in METRICS:
        found[metric] = None
        for key, rates in parts.items() if metric.key == CHANGE else ():
            for name in rates:
                label = f"exact match, {name}"
                found[Metric(label, "rate", ".1%", "stderr", (key, name))] = None
    for figures in models:
        for task, scores in figures.get("tasks", {}).items():
            for key in scores:
                # lm-eval names a metric and its filter, such as acc,none.
                name, comma, filters = key.partition(",")
                error = f"{name}_stderr{comma}{filters}"
                metric = Metric(f"{task}: {key}", key, ".3f", error, ("tasks", task))
                found |= {} if "_stderr" in key else {metric: None}
    for figures in models:
        for name in figures.get("custom", {}):
            found[Metric(name, name, ".4g", block=("custom",))] = None
    return [m for m in found if any(m.values(each)[0] is not None for each in models)]


def metrics_table(
    models: dict[str, dict],
    metrics: Iterable[Metric] | None = None,
    *,
    changes: bool = False,
) -> TableCells:
    """Metrics, one column per model.

    Args:
        metrics: None = those that were measured.
        changes: also show by how much the others differ from the first model.
    """
    rows = []
    for metric in metrics or metrics_of(models.values()):
        measured = [metric.values(figures) for figures in models.values()]
        cells, first = [metric.show(*values) for values in measured], measured[0][0]
        for i, (value, _) in enumerate(measured):
            if changes and i and first and value not in (None, first):
                cells[i] += f" ({value / first - 1:+.1%})"
        rows.append([metric.label, *cells])
    return ["", *models], rows


def recovery_table(recovered: dict) -> TableCells:
    """`gap_recovered` in report.json."""
    models = [
        recovered.get(name, {}) for name in ("fp_baseline", "fp_baseline_rtn", "qat")
    ]
    rows = []
    for label, key in (("loss", "loss"), ("KL to the FP baseline", "kl")):
        loss, share = (
            Metric("", key, form, f"{key}_stderr") for form in (".4f", ".1%")
        )
        cells = [loss.show(*loss.values(figures)) for figures in models]
        rows.append([label, *cells, share.show(*share.values(recovered))])
    gain = Metric("", "gain_retained", ".1%")
    retained = gain.show(*gain.values(recovered))
    rows.append(["gain retained after export", "", "", retained, ""])
    return ["", "FP baseline", "FP baseline + RTN", "QAT", "gap recovered"], rows


def aligned(rows: list[list[str]]) -> list[str]:
    """Rows of cells as lines of text. Only the first column is left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
