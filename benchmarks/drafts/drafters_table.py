"""The tables of `drafters.py`: accepted lengths and acceptance by position."""

from itertools import zip_longest
from math import sqrt
from statistics import mean, stdev

PLAIN = "plain"
ROW = "| {} |"


def print_tables(results: list[dict]) -> None:
    """Print one table per served target and temperature.

    Args:
        results: by seed; statistics by served target, temperature, draft and set.
    """
    for target in results[0]:
        for temperature in results[0][target]:
            runs = [result[target][temperature] for result in results]
            mode = "greedy" if temperature == "0" else f"temperature {temperature}"
            print(f"\n**{target} target, {mode}: accepted length**\n")
            sets = list(runs[0][PLAIN])
            columns = ["draft, trained on", *sets, "all", "by position", "speed-up"]
            print(ROW.format(" | ".join(columns)))
            print(ROW.format(" | ".join(["---"] + ["---:"] * (len(columns) - 1))))
            for draft in runs[0]:
                if draft != PLAIN:
                    print(ROW.format(" | ".join([draft, *_cells(runs, draft, sets)])))
            if temperature == "0":
                _print_parity(runs)


def _cells(runs: list[dict], draft: str, sets: list[str]) -> list[str]:
    by_set = [[_prompts(run, draft, [name]) for run in runs] for name in sets]
    together = [_prompts(run, draft, sets) for run in runs]
    plain = [_prompts(run, PLAIN, sets) for run in runs]
    speedups = [
        _rate(prompts) / _rate(before)
        for prompts, before in zip(together, plain, strict=True)
    ]
    return [
        *(_mean_and_error(column) for column in [*by_set, together]),
        _by_position([prompt for prompts in together for prompt in prompts]),
        f"{mean(speedups):.2f}x",
    ]


def _prompts(run: dict, draft: str, sets: list[str]) -> list[dict]:
    return [prompt for name in sets for prompt in run[draft][name]["prompts"]]


def _mean_and_error(column: list[list[dict]]) -> str:
    """Tokens per forward pass; the error is over seeds, or else over prompts."""
    lengths = [_accepted_length(prompts) for prompts in column]
    if len(lengths) > 1:
        error = stdev(lengths) / sqrt(len(lengths))
    else:
        error = _ratio_error(column[0])
    return f"{mean(lengths):.2f} ± {error:.2f}"


def _accepted_length(prompts: list[dict]) -> float:
    tokens = sum(len(prompt["tokens"]) - 1 for prompt in prompts)
    return tokens / max(1, sum(prompt["passes"] for prompt in prompts))


def _ratio_error(prompts: list[dict]) -> float:
    """Standard error of a ratio of sums, with prompts as clusters."""
    ratio, count = _accepted_length(prompts), len(prompts)
    passes = sum(prompt["passes"] for prompt in prompts)
    squares = sum(
        (len(prompt["tokens"]) - 1 - ratio * prompt["passes"]) ** 2
        for prompt in prompts
    )
    return sqrt(squares * count / max(1, count - 1)) / max(1, passes)


def _by_position(prompts: list[dict]) -> str:
    """Acceptance rates in percent, given that all draft tokens before are accepted."""
    sums = [
        [sum(values) for values in zip_longest(*(p[key] for p in prompts), fillvalue=0)]
        for key in ("accepted", "proposed")
    ]
    return (
        " ".join(f"{100 * a / b:.0f}" for a, b in zip(*sums, strict=True) if b) or "-"
    )


def _rate(prompts: list[dict]) -> float:
    tokens = sum(len(prompt["tokens"]) - 1 for prompt in prompts)
    return tokens / sum(prompt["seconds"] for prompt in prompts)


def _print_parity(runs: list[dict]) -> None:
    """How many greedy completions differ from plain decoding: rounding, or an error."""
    total = differing = 0
    for run in runs:
        for draft, by_set in run.items():
            if draft == PLAIN:
                continue
            for name, result in by_set.items():
                pairs = zip(result["prompts"], run[PLAIN][name]["prompts"], strict=True)
                for prompt, plain in pairs:
                    total += 1
                    differing += prompt["tokens"] != plain["tokens"]
    print(f"\n{differing} of {total} greedy completions differ from plain decoding.")
