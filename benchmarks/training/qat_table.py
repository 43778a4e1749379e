"""The tables of `qat_quality.py`: gap recovered by every method, with errors."""

import numpy as np

COLUMNS = (
    "method",
    "loss",
    "±",
    "recovered",
    "±",
    "KL",
    "±",
    "recovered",
    "±",
    "correct",
    "±",
    "CPU s",
)
ROW = "{:24}{:>9}{:>8}{:>11}{:>8}{:>10}{:>9}{:>11}{:>8}{:>9}{:>7}{:>8}"
GAINS = ("method", "base, RTN", "in training", "exported", "gain retained", "±")
GAINS_ROW = "{:24}{:>15}{:>13}{:>10}{:>15}{:>8}"


def print_tables(
    grid: int | str, methods, results: dict[str, list[dict | None]]
) -> None:
    """The tables of one grid, for methods with a result of every seed."""
    complete = {name: runs for name, runs in results.items() if all(runs)}
    print(
        f"\n{grid}{' bits' if isinstance(grid, int) else ''}\n" + ROW.format(*COLUMNS)
    )
    for method in methods:
        rtn = complete.get("rtn of lora" if method.baseline == "lora" else "rtn")
        if method.name in complete and method.baseline in complete and rtn:
            cells = _cells(complete[method.baseline], rtn, complete[method.name])
            print(ROW.format(method.name, *cells))
    base = complete.get("rtn of the base")
    if base and (names := [n for n in ("lora qat", "qlora") if n in complete]):
        print("\ngain of LoRA over the RTN base, on the validation examples")
        print(GAINS_ROW.format(*GAINS))
        for name in names:
            print(GAINS_ROW.format(name, *_gains(base, complete[name])))


def _cells(full: list[dict], rtn: list[dict], method: list[dict]) -> list[str]:
    from lmx.evaluation.gap_recovery import gap_recovered

    cells = []
    for key, digits in (("loss", 4), ("kl", 5)):
        means = [_mean(run[key], run["tokens"]) for run in method]
        shares = [
            gap_recovered(*(np.array(run[key]) for run in runs))
            for runs in zip(full, rtn, method, strict=True)
        ]
        cells += [f"{value:.{digits}f}" for value in _over_seeds(means)]
        recovered = None if None in shares else _over_seeds(shares)
        cells += [f"{100 * v:.1f}%" for v in recovered] if recovered else ["-", "-"]
    cells += _share_correct([run["correct"] for run in method])
    return [*cells, f"{np.mean([run['cpu'] for run in method]):,.0f}"]


def _share_correct(runs: list[list[int]]) -> list[str]:
    """The exact match of all seeds, and its binomial error."""
    correct = np.concatenate(runs)
    if not len(correct):
        return ["-", "-"]
    rate = correct.mean()
    error = (rate * (1 - rate) / len(correct)) ** 0.5
    return [f"{100 * value:.1f}%" for value in (rate, error)]


def _mean(sums: list[float], tokens: list[float]) -> tuple[float, float]:
    from lmx.data.sequence_mean import mean_over_sequences

    return mean_over_sequences(np.array(sums), np.array(tokens))


def _over_seeds(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """The mean and its error: by seeds, or that of a single seed."""
    if len(pairs) == 1:
        return pairs[0]
    values = np.array([value for value, _ in pairs])
    return values.mean(), values.std(ddof=1) / np.sqrt(len(values))


def _gains(base: list[dict], runs: list[dict]) -> list[str]:
    """Losses of the RTN base, in training and after export, and the gain retained."""
    rtn = np.array([run["valid_loss"] for run in base])
    exported = np.array([run["valid_loss"] for run in runs])
    trained = np.array([run["trained_loss"] for run in runs])
    retained = (rtn - exported) / (rtn - trained)
    cells = [f"{values.mean():.4f}" for values in (rtn, trained, exported)]
    count = len(retained)
    error = retained.std(ddof=1) / np.sqrt(count) if count > 1 else None
    shown = "-" if error is None else f"{100 * error:.1f}%"
    return [*cells, f"{100 * retained.mean():.1f}%", shown]
