"""The table of a run's models, for the console and the model card."""


def table(models: dict[str, dict]) -> tuple[list[str], list[list[str]]]:
    """Column names and rows of what was measured, one column a model."""
    rows = [
        [label, *(show(figures) for figures in models.values())]
        for label, show in ROWS.items()
    ]
    return ["", *models], rows


def _figure(key: str, form: str, error: str | None = None):
    def show(figures: dict) -> str:
        if key not in figures:
            return "-"
        text = form.format(figures[key])
        return f"{text} ± {form.format(figures[error])}" if error else text

    return show


ROWS = {
    "perplexity": _figure("perplexity", "{:.3f}", "perplexity_stderr"),
    "KL to the column before": _figure("kl_mean", "{:.4f}", "kl_stderr"),
    "KL, 99th percentile": _figure("kl_p99", "{:.3f}"),
    "top-1 agreement": _figure("top1_agreement", "{:.1%}"),
    "skill accuracy": _figure("accuracy", "{:.1%}", "accuracy_stderr"),
    "bits per weight": _figure("bits_per_weight", "{:.2f}"),
    "size, MB": lambda figures: f"{figures['bytes'] / 1e6:.2f}",
    "first token, ms": lambda f: f"{f['generation']['ttft_ms']['p50']:.1f}",
    "decode, tokens/s": lambda f: (
        f"{f['generation']['decode_tokens_per_second']['p50']:.0f}"
    ),
}
