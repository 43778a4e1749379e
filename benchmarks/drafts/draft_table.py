"""The tables of `draft_quality.py`: means over seeds, and the gains of distillation."""

from statistics import mean, stdev

PROMPT_LOOKUP, DISTILLED = "prompt_lookup", "distilled"
COLUMNS = (
    *("draft", "acceptance", "±", "accepted", "drafted", "length", "predicted"),
    *("difference", "speed-up", "±", "predicted"),
)
ROW = "{:15}{:>11}{:>7}{:>10}{:>9}{:>8}{:>11}{:>12}{:>10}{:>7}{:>11}"


def print_tables(runs: list[dict[str, dict]]) -> None:
    """Print a table for every temperature.

    Args:
        runs: results by draft, of every seed.
    """
    print(
        "acceptance: acceptance rate at all positions of the target's completions; "
        "accepted: share of\nthe draft tokens of the benchmark; length: accepted "
        "length, tokens per round; difference: predicted\nover measured length"
    )
    for temperature in runs[0][DISTILLED]["results"]:
        is_greedy = temperature == "0"
        print("\ngreedy" if is_greedy else f"\ntemperature {temperature}")
        print(ROW.format(*COLUMNS))
        by_draft = {
            draft: [run[draft]["results"][temperature] for run in runs]
            for draft in runs[0]
        }
        for draft, results in by_draft.items():
            print(ROW.format(draft, *_cells(results, "draft")))
        print(ROW.format("prompt lookup", *_cells(by_draft[DISTILLED], PROMPT_LOOKUP)))
        _print_gains(by_draft)


def _print_gains(by_draft: dict[str, list[dict]]) -> None:
    """The acceptance rate of the distilled draft minus that of the others."""
    rates = {
        draft: [result["predicted_acceptance_rate"] for result in results]
        for draft, results in by_draft.items()
    }
    for draft, values in rates.items():
        if draft != DISTILLED:
            pairs = zip(rates[DISTILLED], values, strict=True)
            gains = [distilled - other for distilled, other in pairs]
            print(f"distilled - {draft}: {mean(gains):+.3f} ± {_spread(gains)}")


def _cells(results: list[dict], proposer: str) -> tuple[str, ...]:
    stats = [result[proposer] for result in results]
    accepted = [s["acceptance_rate"] for s in stats if s["acceptance_rate"] is not None]
    length = mean(s["accepted_length"] for s in stats)
    speedups = [s["speedup"] for s in stats]
    measured = f"{mean(accepted):.3f}" if accepted else "-"
    speedup = f"{mean(speedups):.2f}x", _spread(speedups, 2)
    drafted = f"{mean(result['num_draft_tokens'] for result in results):.1f}"
    if proposer == PROMPT_LOOKUP:
        return "-", "-", measured, drafted, f"{length:.3f}", "-", "-", *speedup, "-"
    rates = [result["predicted_acceptance_rate"] for result in results]
    predicted = mean(result["predicted_accepted_length"] for result in results)
    gain = mean(result["predicted_speedup"] for result in results)
    return (
        f"{mean(rates):.3f}",
        _spread(rates),
        measured,
        drafted,
        f"{length:.3f}",
        f"{predicted:.3f}",
        f"{predicted / length - 1:+.1%}",
        *speedup,
        f"{gain:.2f}x",
    )


def _spread(values: list[float], digits: int = 3) -> str:
    return f"{stdev(values):.{digits}f}" if len(values) > 1 else "-"
