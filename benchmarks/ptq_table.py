"""The table of `ptq_quality.py`: what every route loses, and ratios with errors."""

import numpy as np

COLUMNS = (
    *("route", "KL", "±", "seeds ±", "p99", "top-1", "ppl", "±", "bits"),
    *("seconds", "peak GB", "RSS GB", "chosen"),
)
ROW = "{:17}{:>10}{:>9}{:>9}{:>8}{:>8}{:>8}{:>7}{:>7}{:>9}{:>9}{:>8}  {}"


def print_table(case: str, routes) -> None:
    """Medians of time and memory over seeds, means of all else; then the ratios."""
    if case.endswith("bpw"):
        print(f"\n{case.removesuffix('bpw')} bits per weight, mixed")
    else:
        bits, group = case.split("-")
        print(f"\n{bits} bits, groups of {group}")
    print(ROW.format(*COLUMNS))
    for route in routes:
        failed = [run["failed"] for run in route.runs if run["failed"]]
        if failed:
            print(f"{route.name:17}{'-':>10}  {failed[0]}")
        else:
            print(ROW.format(*_cells(route)))
    done = [route for route in routes if not any(r["failed"] for r in route.runs)]
    _print_ratio(done, "closed", "single")
    _print_ratio(done, "whole", "single")
    _print_ratio(done, "whole", "cascade")


def _cells(route) -> tuple[str, ...]:
    runs = route.runs
    means = [run["kl"].mean() for run in runs]
    nll = np.mean([run["nll"] for run in runs], axis=0).mean(axis=1)
    perplexity = np.exp(nll.mean())
    return (
        route.name,
        f"{np.mean(means):.5f}",
        f"{_error(_by_window(route)):.5f}",
        f"{np.std(means, ddof=1):.5f}" if len(means) > 1 else "-",
        f"{np.mean([np.percentile(run['kl'], 99) for run in runs]):.3f}",
        f"{100 * np.mean([run['agrees'] for run in runs]):.2f}%",
        f"{perplexity:.3f}",
        f"{perplexity * _error(nll):.2f}",
        f"{np.mean([run['bits'] for run in runs]):.3f}",
        f"{np.median([run['seconds'] for run in runs]):,.1f}",
        f"{np.median([run['peak'] for run in runs]) / 1e9:.3f}",
        f"{np.median([run['rss'] for run in runs]) / 1e9:.2f}",
        route.chosen,
    )


def _by_window(route) -> np.ndarray:
    """KL of every window, the mean of all seeds."""
    return np.mean([run["kl"].mean(axis=1) for run in route.runs], axis=0)


def _error(values: np.ndarray) -> float:
    return values.std(ddof=1) / np.sqrt(len(values))


def _print_ratio(routes, ours: str, theirs: str) -> None:
    """KL of our route by the lowest of theirs, by windows in pairs."""
    above = [_by_window(route) for route in routes if route.kind == ours]
    found = [(r, _by_window(r)) for r in routes if r.kind == theirs]
    if not above or not found:
        return
    best, below = min(found, key=lambda pair: pair[1].mean())
    ratio = above[0].mean() / below.mean()
    # To first order, as of any ratio of means.
    error = _error(above[0] - ratio * below) / below.mean()
    name = {"closed": "lmx closed form", "whole": "lmx"}[ours]
    print(f"{name} / best {theirs} ({best.name}): {ratio:.3f} ± {error:.3f}")
