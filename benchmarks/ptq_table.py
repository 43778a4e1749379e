"""The table of `ptq_quality.py`: KL of every method, and ratios with errors."""

import numpy as np

COLUMNS = (
    *("method", "KL", "±", "seeds ±", "p99", "top-1", "ppl", "±", "bits"),
    *("seconds", "peak GB", "RSS GB", "chosen"),
)
ROW = "{:17}{:>10}{:>9}{:>9}{:>8}{:>8}{:>8}{:>7}{:>7}{:>9}{:>9}{:>8}  {}"


def print_table(case: str, methods) -> None:
    """Medians of time and memory over seeds, means of the others; then the ratios."""
    if case.endswith("bpw"):
        print(f"\n{case.removesuffix('bpw')} bits per weight, mixed")
    elif "-" not in case:
        print(f"\n{case}")
    else:
        bits, group = case.split("-")
        print(f"\n{bits} bits, groups of {group}")
    print(ROW.format(*COLUMNS))
    for method in methods:
        failed = [run["failed"] for run in method.runs if run["failed"]]
        if failed:
            print(f"{method.name:17}{'-':>10}  {failed[0]}")
        else:
            print(ROW.format(*_cells(method)))
    done = [m for m in methods if not any(run["failed"] for run in m.runs)]
    _print_ratio(done, "untuned", "single")
    _print_ratio(done, "tuned", "single")
    _print_ratio(done, "tuned", "cascade")


def _cells(method) -> tuple[str, ...]:
    runs = method.runs
    means = [run["kl"].mean() for run in runs]
    nll = np.mean([run["nll"] for run in runs], axis=0).mean(axis=1)
    perplexity = np.exp(nll.mean())
    return (
        method.name,
        f"{np.mean(means):.5f}",
        f"{_error(_by_sequence(method)):.5f}",
        f"{np.std(means, ddof=1):.5f}" if len(means) > 1 else "-",
        f"{np.mean([np.percentile(run['kl'], 99) for run in runs]):.3f}",
        f"{100 * np.mean([run['agrees'] for run in runs]):.2f}%",
        f"{perplexity:.3f}",
        f"{perplexity * _error(nll):.2f}",
        f"{np.mean([run['bits'] for run in runs]):.3f}",
        f"{np.median([run['seconds'] for run in runs]):,.1f}",
        f"{np.median([run['peak'] for run in runs]) / 1e9:.3f}",
        f"{np.median([run['rss'] for run in runs]) / 1e9:.2f}",
        method.chosen,
    )


def _by_sequence(method) -> np.ndarray:
    """Mean KL over seeds, by sequence."""
    return np.mean([run["kl"].mean(axis=1) for run in method.runs], axis=0)


def _error(values: np.ndarray) -> float:
    return values.std(ddof=1) / np.sqrt(len(values))


def _print_ratio(methods, kind: str, baseline_kind: str) -> None:
    """KL of lmx / the lowest KL of the baselines, paired by sequence."""
    values = [_by_sequence(method) for method in methods if method.kind == kind]
    baselines = [(m, _by_sequence(m)) for m in methods if m.kind == baseline_kind]
    if not values or not baselines:
        return
    best, baseline = min(baselines, key=lambda pair: pair[1].mean())
    ratio = values[0].mean() / baseline.mean()
    # First-order error of a ratio of means.
    error = _error(values[0] - ratio * baseline) / baseline.mean()
    name = {"untuned": "lmx untuned", "tuned": "lmx"}[kind]
    print(f"{name} / best {baseline_kind} ({best.name}): {ratio:.3f} ± {error:.3f}")
