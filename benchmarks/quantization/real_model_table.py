"""The tables of `real_model.py`, in Markdown."""

import statistics

import numpy as np

NAMES = {"text": "WikiText-2", "answers": "GSM8K"}


def print_table(part: str, case: str, records: dict[str, list[dict]]) -> None:
    """Print one table: means over seeds, with standard errors by sequence."""
    records = {name: runs for name, runs in records.items() if runs}
    if not records:
        return
    kinds = {"budget": " bits per weight", "formats": "", "activations": ""}
    print(f"\n**{part}, {case}{kinds.get(part, ' bits, groups of 64')}**\n")
    if part == "cost":
        _print_cost(records)
        return
    texts = next(
        (list(r[0]["sequences"]) for r in records.values() if "sequences" in r[0]), []
    )
    columns = ["method"]
    for text in texts:
        name = NAMES.get(text, text)
        columns += [f"{name} KL", "perplexity", "top-1"]
    columns += ["bits", "seconds", "CPU s", "peak GB", "RSS GB", "seeds"]
    _print_row(columns)
    _print_row(["---"] + ["---:"] * (len(columns) - 1))
    for name, runs in records.items():
        if failed := [run["failed"] for run in runs if run["failed"]]:
            _print_row([name, failed[0]] + [""] * (len(columns) - 2))
        else:
            _print_row([name, *_quality(runs, texts), *_times(runs)])
    if part == "activations":
        _print_differences(records, texts)


def _quality(runs: list[dict], texts: list[str]) -> list[str]:
    cells = []
    for text in texts:
        kl, kl_error = mean_per_token(runs, text, "kl")
        nll, nll_error = mean_per_token(runs, text, "nll")
        agrees, _ = mean_per_token(runs, text, "agrees")
        perplexity = np.exp(nll)
        cells.append(f"{kl:.4f} ± {kl_error:.4f}")
        cells.append(f"{perplexity:.2f} ± {perplexity * nll_error:.2f}")
        cells.append(f"{agrees:.1%}")
    return [*cells, f"{statistics.fmean(run['bits'] for run in runs):.2f}"]


def _print_differences(records: dict[str, list[dict]], texts: list[str]) -> None:
    """What smoothing changes, with errors of paired sequences."""
    for name, runs in records.items():
        method, _, strength = name.partition(" smoothing ")
        if strength and method in records:
            for text in texts:
                pairs = zip(runs, records[method] * len(runs), strict=False)
                paired = [difference(*pair, text) for pair in pairs]
                mean, error = mean_per_token(paired, text, "kl")
                label = NAMES.get(text, text)
                print(f"{name} - {method}, {label}: KL {mean:+.4f} ± {error:.4f}")


def difference(run: dict, other: dict, text: str) -> dict:
    """A record with the differences of the sums of every sequence."""
    pairs = zip(run["sequences"][text], other["sequences"][text], strict=True)
    rows = [{"count": a["count"], "kl": a["kl"] - b["kl"]} for a, b in pairs]
    return {"sequences": {text: rows}}


def mean_per_token(runs: list[dict], text: str, key: str) -> tuple[float, float]:
    """Mean per token over sequences and seeds, and its standard error by sequence."""
    counts = np.array([s["count"] for s in runs[0]["sequences"][text]])
    sums = np.mean([[s[key] for s in run["sequences"][text]] for run in runs], axis=0)
    mean = sums.sum() / counts.sum()
    # First-order error of a ratio of sums.
    error = np.sqrt(np.square(sums - mean * counts).sum()) / counts.sum()
    return mean, error


def _times(runs: list[dict]) -> list[str]:
    medians = {
        key: statistics.median(run[key] for run in runs)
        for key in ("seconds", "processor_seconds", "peak", "rss")
    }
    return [
        f"{medians['seconds']:.0f}",
        f"{medians['processor_seconds']:.0f}",
        f"{medians['peak'] / 1e9:.2f}",
        f"{medians['rss'] / 1e9:.2f}",
        str(len(runs)),
    ]


def _print_cost(records: dict[str, list[dict]]) -> None:
    """Medians over alternating runs, and their ratios to the first method."""
    methods: dict[str, list[dict]] = {}
    for name, runs in records.items():
        methods.setdefault(name.partition(",")[0], []).extend(runs)
    columns = ["method", "seconds", "ratio", "CPU s", "ratio", "peak GB", "ratio"]
    columns += ["RSS GB", "ratio", "runs"]
    _print_row(columns)
    _print_row(["---"] + ["---:"] * (len(columns) - 1))
    first: dict[str, float] = {}
    for name, runs in methods.items():
        if failed := [run["failed"] for run in runs if run["failed"]]:
            _print_row([name, failed[0]] + [""] * (len(columns) - 2))
            continue
        cells = []
        for key, unit in (
            *(("seconds", 1), ("processor_seconds", 1)),
            *(("peak", 1e9), ("rss", 1e9)),
        ):
            value = statistics.median(run[key] for run in runs) / unit
            ratio = value / first.setdefault(key, value)
            cells += [f"{value:.0f}" if unit == 1 else f"{value:.2f}", f"{ratio:.2f}"]
        _print_row([name, *cells, str(len(runs))])


def _print_row(cells: list[str]) -> None:
    print(f"| {' | '.join(cells)} |")
