"""The table of a run's models, for the console and the model card."""


def table(models: dict[str, dict]) -> tuple[list[str], list[list[str]]]:
    """Column names and rows of what was measured, one column a model."""
    rows = [
        [label, *(show(figures) for figures in models.values())]
        for label, show in (ROWS | _tasks(models)).items()
    ]
    return ["", *models], rows


def _tasks(models: dict[str, dict]) -> dict:
    """A row for every metric of the tasks that were measured."""
    measured = [figures.get("tasks", {}) for figures in models.values()]
    names = {
        (task, metric): None
        for tasks in measured
        for task, scores in tasks.items()
        for metric in scores
        if "_stderr" not in metric
    }
    return {f"{task}: {metric}": _score(task, metric) for task, metric in names}


def _score(task: str, metric: str):
    def show(figures: dict) -> str:
        scores = figures.get("tasks", {}).get(task, {})
        if metric not in scores:
            return "-"
        name, comma, answers = metric.partition(",")
        error = scores.get(f"{name}_stderr{comma}{answers}")
        text = f"{scores[metric]:.3f}"
        return text if error is None else f"{text} ± {error:.3f}"

    return show


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
