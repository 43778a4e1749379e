"""Compare time and memory of lmx's GPTQ and mlx_lm's gptq on random weights.

Both get the same calibration tokens and BLAS. Each run is a separate process, and the
methods alternate. `ptq_quality.py` compares the quality.
"""

import argparse
import statistics
import tempfile
from itertools import islice
from pathlib import Path

import random_llama
from lmx.models import checkpoint_writer
from ptq_quality import call_runner, write_inputs

SOURCE, NUM_DOCUMENTS, GROUP_SIZE = "builtin:stdlib", 300, 64
GRID = {"bits": 4, "group_size": GROUP_SIZE}
LMX = GRID | {"method": "gptq", "scale_tuning": False, "rollback_if_worse": False}
PLAIN = {"refine_iters": 0, "asymmetric_calibration": False, "output_hessian": False}
METHODS = {
    "mlx-lm": ("gptq", GRID | {"stored": True}),
    "mlx-lm, float32": ("gptq", GRID),
    "lmx, plain pass": ("lmx", LMX | PLAIN),
    "lmx": ("lmx", LMX),
}
COLUMNS = ("method", "seconds", "ratio", "CPU s", "ratio", "peak GB", "ratio", "RSS GB")
ROW = "{:17}{:>9}{:>7}{:>9}{:>7}{:>9}{:>7}{:>8}  {}"


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = _prepare(folder, arguments)
        print(
            f"Random Llama, {count:,} parameters, float16, {arguments.num_tokens:,} "
            f"tokens; 4 bits, groups of {GROUP_SIZE}; medians of {arguments.repeats}\n"
            "alternating runs, loading and saving included; ratio to the first row.\n"
            "mlx-lm computes in the stored dtype; float32 = the model is cast first."
        )
        runs: dict[str, list[dict]] = {method: [] for method in METHODS}
        for number in range(arguments.repeats):
            for method in list(METHODS)[:: -1 if number % 2 else 1]:
                runner, options = METHODS[method]
                target = folder / f"{len(runs[method])}-{method.replace(' ', '-')}"
                run = call_runner(runner, folder, target, options, arguments.threads)
                runs[method].append(run)
    _print_table(runs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--vocab-size", type=int, default=16384)
    parser.add_argument("--num-tokens", type=int, default=16384, help="calibration")
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3, help="runs per method")
    parser.add_argument("--threads", type=int, help="default: all cores")
    return parser.parse_args()


def _prepare(folder: Path, arguments: argparse.Namespace) -> int:
    """Write the model and the inputs of the runs; returns the number of parameters."""
    from lmx.data.dataset import RecordReader
    from lmx.models import from_scratch

    width = -(-8 * arguments.hidden_size // 3 // GROUP_SIZE) * GROUP_SIZE
    config = random_llama.configuration(arguments, intermediate_size=width)
    tokenizer, model = folder / "tokenizer", folder / "model"
    tokenizer.mkdir()
    model.mkdir()
    texts = (row.as_text() for row in islice(RecordReader(SOURCE), NUM_DOCUMENTS))
    from_scratch.train_tokenizer(texts, arguments.vocab_size, tokenizer)
    weights = from_scratch.initial_weights(config, 0)
    # Writing frees the weights, so count them first.
    count = sum(weight.size for weight in weights.values())
    checkpoint_writer.write_checkpoint(model, weights, config, companions=tokenizer)
    write_inputs(
        *(folder, model, SOURCE, arguments.num_tokens, arguments.seq_length, 0),
        split_eval=False,
    )
    return count


def _print_table(runs: dict[str, list[dict]]) -> None:
    print(ROW.format(*COLUMNS, ""))
    columns = {"seconds": 1, "processor_seconds": 1, "peak": 1e9}
    first: dict[str, float] = {}
    for method, entries in runs.items():
        if failed := [run["failed"] for run in entries if run["failed"]]:
            print(f"{method:17}{'-':>9}  {failed[0]}")
            continue
        cells = []
        for key, unit in columns.items():
            value = statistics.median(run[key] for run in entries) / unit
            first.setdefault(key, value)
            cells += [f"{value:,.2f}", f"{value / first[key]:.2f}x"]
        rss = statistics.median(run["rss"] for run in entries) / 1e9
        print(ROW.format(method, *cells, f"{rss:.2f}", entries[0]["engine"]))


if __name__ == "__main__":
    main()
