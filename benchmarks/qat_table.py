"""The tables of `qat_quality.py`: what every route won back, with errors."""

import numpy as np

COLUMNS = ("route", "loss", "±", "recovered", "±", "KL", "±", "recovered", "±", "CPU s")
ROW = "{:24}{:>9}{:>8}{:>11}{:>8}{:>10}{:>9}{:>11}{:>8}{:>8}"
GAINS = ("route", "base, rounded", "in training", "exported", "gain kept", "±")
GAINS_ROW = "{:24}{:>15}{:>13}{:>10}{:>11}{:>8}"


def print_tables(bits: int, routes, results: dict[str, list[dict | None]]) -> None:
    """What was found at one width, of routes with a result for every seed."""
    whole = {name: found for name, found in results.items() if all(found)}
    print(f"\n{bits} bits\n" + ROW.format(*COLUMNS))
    for route in routes:
        rtn = whole.get("rtn of lora" if route.twin == "lora" else "rtn of the twin")
        if route.name in whole and route.twin in whole and rtn:
            cells = _cells(whole[route.twin], rtn, whole[route.name])
            print(ROW.format(route.name, *cells))
    base = whole.get("rtn of the base")
    if base and (named := [n for n in ("lora qat", "qlora") if n in whole]):
        print("\nwhat LoRA gains over the rounded base, on the validation rows")
        print(GAINS_ROW.format(*GAINS))
        for name in named:
            print(GAINS_ROW.format(name, *_gains(base, whole[name])))


def _cells(full: list[dict], rtn: list[dict], route: list[dict]) -> list[str]:
    from lmx.evaluation.gap_recovery import gap_recovered

    cells = []
    for key, digits in (("loss", 4), ("kl", 5)):
        means = [_mean(run[key], run["tokens"]) for run in route]
        shares = [
            gap_recovered(*(np.array(run[key]) for run in runs))
            for runs in zip(full, rtn, route, strict=True)
        ]
        cells += [f"{value:.{digits}f}" for value in _over_seeds(means)]
        found = None if None in shares else _over_seeds(shares)
        cells += [f"{100 * v:.1f}%" for v in found] if found else ["-", "-"]
    return [*cells, f"{np.mean([run['cpu'] for run in route]):,.0f}"]


def _mean(sums: list[float], tokens: list[float]) -> tuple[float, float]:
    from lmx.evaluation.perplexity import mean_over_rows

    return mean_over_rows(np.array(sums), np.array(tokens))


def _over_seeds(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """The mean and its error: by seeds, or that of the only one."""
    if len(pairs) == 1:
        return pairs[0]
    values = np.array([value for value, _ in pairs])
    return values.mean(), values.std(ddof=1) / np.sqrt(len(values))


def _gains(base: list[dict], runs: list[dict]) -> list[str]:
    """Losses before, in training and after the export, and what is kept of the gain."""
    rounded = np.array([run["valid_loss"] for run in base])
    exported = np.array([run["valid_loss"] for run in runs])
    trained = np.array([run["trained_loss"] for run in runs])
    kept = (rounded - exported) / (rounded - trained)
    cells = [f"{values.mean():.4f}" for values in (rounded, trained, exported)]
    error = kept.std(ddof=1) / np.sqrt(len(kept)) if len(kept) > 1 else None
    shown = "-" if error is None else f"{100 * error:.1f}%"
    return [*cells, f"{100 * kept.mean():.1f}%", shown]
