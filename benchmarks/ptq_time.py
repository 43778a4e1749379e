"""Time and memory of lmx's closed form beside mlx_lm's gptq; weights are random.

The same calibration tokens and BLAS; every run is a process of its own, and the sides
alternate. What comes out is not judged: see `ptq_quality.py`.
"""

import argparse
import statistics
import tempfile
from itertools import islice
from pathlib import Path

import random_llama
from lmx.models import checkpoint_writer
from ptq_quality import call_side, write_inputs

SOURCE, DOCUMENTS, GROUP = "builtin:stdlib", 300, 64
GRID = {"bits": 4, "group_size": GROUP}
OURS = GRID | {"method": "gptq", "scale_tuning": False, "rollback_if_worse": False}
PLAIN = {"refine_iters": 0, "asymmetric_calibration": False, "output_hessian": False}
SIDES = {
    "mlx-lm": ("gptq", GRID | {"stored": True}),
    "mlx-lm, float32": ("gptq", GRID),
    "lmx, plain pass": ("lmx", OURS | PLAIN),
    "lmx": ("lmx", OURS),
}
COLUMNS = ("side", "seconds", "ratio", "CPU s", "ratio", "peak GB", "ratio", "RSS GB")
ROW = "{:17}{:>9}{:>7}{:>9}{:>7}{:>9}{:>7}{:>8}  {}"


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = _prepare(folder, arguments)
        print(
            f"Random Llama of {count:,} parameters in float16, {arguments.tokens:,} "
            f"tokens; 4 bits, groups of {GROUP}; medians of {arguments.rounds}\n"
            "alternating runs, loading and saving included; ratio = by what the first "
            "row has.\nmlx-lm computes in the type that the model stores; float32 is "
            "what it does with a model cast by hand."
        )
        runs: dict[str, list[dict]] = {side: [] for side in SIDES}
        for number in range(arguments.rounds):
            for side in list(SIDES)[:: -1 if number % 2 else 1]:
                program, options = SIDES[side]
                target = folder / f"{len(runs[side])}-{side.replace(' ', '-')}"
                run = call_side(program, folder, target, options, arguments.threads)
                runs[side].append(run)
    _print_table(runs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--tokens", type=int, default=16384, help="to calibrate on")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--rounds", type=int, default=3, help="runs of every side")
    parser.add_argument("--threads", type=int, help="of every side; absent = all")
    return parser.parse_args()


def _prepare(folder: Path, arguments: argparse.Namespace) -> int:
    """Write the model and what every side reads; returns the model's parameters."""
    from lmx.data.dataset import RowReader
    from lmx.models import from_scratch

    width = -(-8 * arguments.hidden // 3 // GROUP) * GROUP
    config = random_llama.configuration(arguments, intermediate_size=width)
    tokenizer, model = folder / "tokenizer", folder / "model"
    tokenizer.mkdir()
    model.mkdir()
    texts = (row.as_text() for row in islice(RowReader(SOURCE), DOCUMENTS))
    from_scratch.train_tokenizer(texts, arguments.vocabulary, tokenizer)
    weights = from_scratch.initial_weights(config, 0)
    # They are let go as they are written.
    count = sum(weight.size for weight in weights.values())
    checkpoint_writer.write_checkpoint(model, weights, config, companions=tokenizer)
    length = arguments.length
    write_inputs(folder, model, SOURCE, arguments.tokens, length, 0, judged=False)
    return count


def _print_table(runs: dict[str, list[dict]]) -> None:
    print(ROW.format(*COLUMNS, ""))
    columns = {"seconds": 1, "processor_seconds": 1, "peak": 1e9}
    first: dict[str, float] = {}
    for side, found in runs.items():
        if failed := [run["failed"] for run in found if run["failed"]]:
            print(f"{side:17}{'-':>9}  {failed[0]}")
            continue
        cells = []
        for key, unit in columns.items():
            value = statistics.median(run[key] for run in found) / unit
            first.setdefault(key, value)
            cells += [f"{value:,.2f}", f"{value / first[key]:.2f}x"]
        rss = statistics.median(run["rss"] for run in found) / 1e9
        print(ROW.format(side, *cells, f"{rss:.2f}", found[0]["engine"]))


if __name__ == "__main__":
    main()
