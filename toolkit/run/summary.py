"""The figures of a run's models as people read them: console, card and page."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One thing measured of a model.

    Attributes:
        path: of its value in a model's entry of report.json, dotted.
        form: how a value is written.
        error: path of its standard error, if it has one.
    """

    label: str
    path: str
    form: str
    error: str | None = None
    scale: float = 1.0

    def value(self, figures: dict) -> float | None:
        """The value in its unit; None where it was not measured."""
        found = look_up(figures, self.path)
        return None if found is None else found * self.scale

    def show(self, figures: dict) -> str:
        """The value as text, with its standard error."""
        value = self.value(figures)
        if value is None:
            return "-"
        error = look_up(figures, self.error) if self.error else None
        text = self.form.format(value)
        return text if error is None else f"{text} ± {self.form.format(error)}"


FIGURES = (
    Figure("perplexity", "perplexity", "{:.3f}", "perplexity_stderr"),
    Figure("KL to the model before", "kl_mean", "{:.4f}", "kl_stderr"),
    Figure("KL, 99th percentile", "kl_p99", "{:.3f}"),
    Figure("top-1 agreement", "top1_agreement", "{:.1%}"),
    Figure("skill accuracy", "accuracy", "{:.1%}", "accuracy_stderr"),
    Figure("bits per weight", "bits_per_weight", "{:.2f}"),
    Figure("size, MB", "bytes", "{:.2f}", scale=1e-6),
    Figure("first token, ms", "generation.ttft_ms.p50", "{:.1f}"),
    Figure("decode, tokens/s", "generation.decode_tokens_per_second.p50", "{:.0f}"),
)


def table(models: dict[str, dict]) -> tuple[list[str], list[list[str]]]:
    """Column names and rows of what was measured, one column a model."""
    rows = [
        [figure.label, *(figure.show(figures) for figures in models.values())]
        for figure in FIGURES
    ]
    return ["", *models], rows


def look_up(values: dict, path: str):
    """What a dotted path means in nested dicts; None where it leads nowhere."""
    for key in path.split("."):
        values = values.get(key) if isinstance(values, dict) else None
    return values
