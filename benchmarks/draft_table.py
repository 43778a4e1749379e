"""The tables of `draft_quality.py`: means over seeds, and what distilling gained."""

from statistics import mean, stdev

LOOKUP, DISTILLED = "prompt_lookup", "distilled"
COLUMNS = (
    *("route", "predicted", "±", "accept", "drafted", "accepted len", "predicted"),
    *("apart", "speed-up", "±", "predicted"),
)
ROW = "{:15}{:>8}{:>8}{:>8}{:>9}{:>14}{:>11}{:>8}{:>10}{:>7}{:>11}"


def print_tables(runs: list[dict[str, dict]]) -> None:
    """Print a table for every way of sampling.

    Args:
        runs: what was found, by route, of every seed.
    """
    print(
        "chance: of a guess to stand, at all places; stand: of the guesses made, those "
        "that stood\nbehind others that did; apart: tokens a round, predicted over "
        "measured"
    )
    for heat in runs[0][DISTILLED]["found"]:
        print("\ngreedy" if heat == "0" else f"\ntemperature {heat}")
        print(ROW.format(*COLUMNS))
        for route in runs[0]:
            found = [run[route]["found"][heat] for run in runs]
            print(ROW.format(route, *_cells(found, "draft")))
        found = [run[DISTILLED]["found"][heat] for run in runs]
        print(ROW.format(LOOKUP, *_cells(found, LOOKUP)))
        chances = {
            route: [
                run[route]["found"][heat]["predicted_acceptance_rate"] for run in runs
            ]
            for route in runs[0]
        }
        for route in runs[0]:
            if route != DISTILLED:
                pairs = zip(chances[DISTILLED], chances[route], strict=True)
                gains = [ours - theirs for ours, theirs in pairs]
                print(f"distilled over {route}: {mean(gains):+.3f} ± {_spread(gains)}")


def _cells(found: list[dict], proposer: str) -> tuple[str, ...]:
    columns = [one[proposer] for one in found]
    stood = [c["acceptance_rate"] for c in columns if c["acceptance_rate"] is not None]
    rounds = mean(column["accepted_length"] for column in columns)
    speedups = [column["speedup"] for column in columns]
    measured = (f"{mean(stood):.3f}" if stood else "-", f"{rounds:.3f}")
    speed = (f"{mean(speedups):.2f}x", _spread(speedups, 2))
    guesses = f"{mean(one['num_draft_tokens'] for one in found):.1f}"
    if proposer == LOOKUP:
        return "-", "-", measured[0], guesses, measured[1], "-", "-", *speed, "-"
    chances = [one["predicted_acceptance_rate"] for one in found]
    predicted = mean(one["predicted_accepted_length"] for one in found)
    gain = mean(one["predicted_speedup"] for one in found)
    return (
        f"{mean(chances):.3f}",
        _spread(chances),
        measured[0],
        guesses,
        measured[1],
        f"{predicted:.3f}",
        f"{predicted / rounds - 1:+.1%}",
        *speed,
        f"{gain:.2f}x",
    )


def _spread(values: list[float], digits: int = 3) -> str:
    return f"{stdev(values):.{digits}f}" if len(values) > 1 else "-"
