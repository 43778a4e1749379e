"""What a train stage pays for its rows: first start, cached start, every step, memory.

Every start is a process of its own and does what a train stage does before and in its
steps, with a model so small that the rows are most of the work.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lmx.models import checkpoint_writer

ROW = "{:>10}{:>9}{:>10}{:>10}{:>10}{:>10}{:>10}{:>11}{:>11}"
VOCABULARY, HIDDEN, LENGTH = 512, 64, 64
HEAD = """\
Rows of one short question and its answer, by the chat template of a fresh model; one
in twenty is held out, at most 2,000. Batches of {batch} rows. Seconds are of everything
before the first step: reading, hashing, holding out, tokenising{packing}. A cached
start is a new process with the same rows. MB are what the rows and {steps} batches of
them added to the most memory the process had; what is mapped from disk counts. batch =
making one; tokens/s = trained in {steps} steps of a model of one layer.
"""


def main() -> None:
    arguments = _arguments()
    if arguments.start:
        print(json.dumps(_start(arguments)))
        return
    packing = ", packing" if arguments.packing else ""
    print(HEAD.format(batch=arguments.batch, steps=arguments.steps, packing=packing))
    titles = ("rows", "file MB", "first s", "rows/s", "first MB", "cached s")
    print(ROW.format(*titles, "cached MB", "batch ms", "tokens/s"))
    for rows in arguments.rows:
        print(ROW.format(*_measured(rows, arguments)), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000]
    )
    parser.add_argument("--batch", type=int, default=32, help="rows")
    parser.add_argument("--steps", type=int, default=100, help="timed in every run")
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _measured(rows: int, arguments: argparse.Namespace) -> list[str]:
    """The cells of one number of rows."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_rows(folder / "rows.jsonl", rows)
        _write_model(folder / "model")
        first, cached = (_run(folder, arguments) for _ in range(2))
    assert first["made"], "found something in an empty cache"
    assert not cached["made"], "tokenised twice"
    assert first["digest"] == cached["digest"], "other rows from the cache"
    return [
        f"{rows:,}",
        f"{first['file'] / 1e6:,.1f}",
        f"{first['seconds']:,.2f}",
        f"{rows / first['seconds']:,.0f}",
        f"{first['memory'] / 1e6:,.0f}",
        f"{cached['seconds']:.2f}",
        f"{cached['memory'] / 1e6:,.0f}",
        f"{1000 * cached['batch']:.2f}",
        f"{cached['speed']:,.0f}",
    ]


def _run(folder: Path, arguments: argparse.Namespace) -> dict:
    command = [sys.executable, __file__, "--start", str(folder)]
    command += ["--batch", str(arguments.batch), "--steps", str(arguments.steps)]
    command += ["--packing"] * arguments.packing
    environment = os.environ | {"LMX_CACHE": str(folder / "cache")}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _write_rows(path: Path, count: int) -> None:
    words = ("north", "south", "river", "stone", "seven", "green", "light", "early")
    with path.open("w") as stream:
        for number in range(count):
            chosen = [words[number // 8**place % 8] for place in range(6)]
            extra = chosen * (number % 3)
            row = {"prompt": f"Repeat: {' '.join(chosen)}", "completion": ""}
            row["completion"] = " ".join([*chosen, *extra, str(number)])
            stream.write(json.dumps(row) + "\n")


def _write_model(folder: Path) -> None:
    from lmx.config.model import ScratchModelConfig
    from lmx.models import from_scratch

    config = from_scratch.llama_config(
        ScratchModelConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=1,
            num_attention_heads=1,
            dtype="float32",
        )
    )
    folder.mkdir()
    with tempfile.TemporaryDirectory() as scratch:
        texts = ["Repeat: north south river stone seven green 0123456789"] * 9
        from_scratch.train_tokenizer(texts, VOCABULARY, Path(scratch))
        weights = from_scratch.initial_weights(config, 0)
        checkpoint_writer.write_checkpoint(
            folder, weights, config, companions=Path(scratch)
        )


def _start(arguments: argparse.Namespace) -> dict:
    """One start in the folder that `_measured` filled."""
    from lmx import cpu

    cpu.enable()
    from lmx.config.train import TrainConfig
    from lmx.data import cache
    from lmx.pipeline.batches import training_batches

    config = TrainConfig(steps=1, batch_size=arguments.batch, packing=arguments.packing)
    context = _context(arguments.start)
    loaded = context.load(context.base)
    made = not (cache.root() / "tokens").exists()
    before, begun = _peak_memory(), time.perf_counter()
    batches = training_batches(config, context, loaded, packing=config.packing)
    assert context.rows.valid
    seconds = time.perf_counter() - begun
    making = _making(batches, arguments.steps)
    memory = _peak_memory() - before
    return {
        "made": made,
        "digest": batches.digest,
        "file": (arguments.start / "rows.jsonl").stat().st_size,
        "seconds": seconds,
        "memory": memory,
        "batch": making,
        "speed": _speed(batches, loaded, config, arguments.steps),
    }


def _context(folder: Path):
    from lmx.config.data import DataConfig
    from lmx.config.model import ModelConfig
    from lmx.data.splits import Splits
    from lmx.pipeline.context import StageContext
    from lmx.run.logger import RunLogger

    data = DataConfig(train=str(folder / "rows.jsonl"), max_seq_length=LENGTH)
    logger = RunLogger(None, quiet=True)
    rows = Splits(data, find=Path, seed=0, info=logger.info, warning=logger.warning)
    return StageContext(
        folder=folder,
        output=folder,
        name="benchmark",
        source=ModelConfig(path=str(folder / "model")),
        data=data,
        seed=0,
        current=None,
        logger=logger,
        find=Path,
        rows=rows,
    )


def _making(batches, count: int) -> float:
    """Seconds to make a batch, the middle one of many; the first shuffles the epoch."""
    import mlx.core as mx

    seconds = []
    for number in range(count):
        begun = time.perf_counter()
        mx.eval(batches(number).arrays[:2])
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def _speed(batches, loaded, config, count: int) -> float:
    """Trained tokens a second, batches included; the first of every shape is traced."""
    import mlx.core as mx
    from lmx.training.document_mask import DocumentCaches
    from lmx.training.step import TrainStep

    step = TrainStep(loaded.model)
    if config.packing:
        step.caches = DocumentCaches(loaded.model)
    shapes, seconds, trained = set(), 0.0, 0
    for number in range(count):
        begun = time.perf_counter()
        batch = batches(number)
        outputs = step(batch, 1e-4, number)
        mx.eval(outputs, step.parameters, step.optimizer.state)
        if batch.tokens.shape in shapes:
            seconds += time.perf_counter() - begun
            trained += outputs[1].item()
        shapes.add(batch.tokens.shape)
    return trained / seconds if trained else 0.0


def _peak_memory() -> int:
    """Bytes this process has had at most."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


if __name__ == "__main__":
    main()
