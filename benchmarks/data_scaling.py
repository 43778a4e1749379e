"""Time the data pipeline of a train stage: first start, cached start, steps, memory.

Each start is a separate process that runs the data pipeline of a train stage. The model
is so small that reading and batching examples is most of the work.
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
VOCAB_SIZE, HIDDEN_SIZE, SEQ_LENGTH = 512, 64, 64
HEADER = """\
Examples are short questions with an answer; 5 %, at most 2,000, are set aside for
validation. Batches of {batch_size} examples. Seconds include all work before the first
step: reading, hashing, splitting, tokenizing{packing}. A cached start is a new process
with the same examples. MB is the growth of the peak memory by the examples and {steps}
batches, memory-mapped files included. batch ms = time to make a batch; tokens/s =
trained tokens in {steps} steps of a model of one layer.
"""


def main() -> None:
    arguments = _arguments()
    if arguments.start:
        print(json.dumps(_start(arguments)))
        return
    packing = ", packing" if arguments.packing else ""
    print(
        HEADER.format(
            batch_size=arguments.batch_size, steps=arguments.steps, packing=packing
        )
    )
    titles = ("examples", "file MB", "first s", "per s", "first MB", "cached s")
    print(ROW.format(*titles, "cached MB", "batch ms", "tokens/s"))
    for count in arguments.num_examples:
        print(ROW.format(*_measure(count, arguments)), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--num-examples",
        type=int,
        nargs="+",
        default=[1_000, 10_000, 100_000, 1_000_000],
    )
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100, help="timed steps per run")
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure(count: int, arguments: argparse.Namespace) -> list[str]:
    """The table row for a number of examples."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_examples(folder / "examples.jsonl", count)
        _write_model(folder / "model")
        first, cached = (_run(folder, arguments) for _ in range(2))
    assert first["tokenized"], "the empty cache had tokens"
    assert not cached["tokenized"], "the cache was not used"
    assert first["digest"] == cached["digest"], "the cache returned other examples"
    return [
        f"{count:,}",
        f"{first['file'] / 1e6:,.1f}",
        f"{first['seconds']:,.2f}",
        f"{count / first['seconds']:,.0f}",
        f"{first['memory'] / 1e6:,.0f}",
        f"{cached['seconds']:.2f}",
        f"{cached['memory'] / 1e6:,.0f}",
        f"{1000 * cached['batch']:.2f}",
        f"{cached['speed']:,.0f}",
    ]


def _run(folder: Path, arguments: argparse.Namespace) -> dict:
    command = [sys.executable, __file__, "--start", str(folder)]
    command += [
        "--batch-size",
        str(arguments.batch_size),
        "--steps",
        str(arguments.steps),
    ]
    command += ["--packing"] * arguments.packing
    environment = os.environ | {"LMX_CACHE": str(folder / "cache")}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _write_examples(path: Path, count: int) -> None:
    words = ("north", "south", "river", "stone", "seven", "green", "light", "early")
    with path.open("w") as stream:
        for number in range(count):
            selected = [words[number // 8**place % 8] for place in range(6)]
            extra = selected * (number % 3)
            prompt = f"Repeat: {' '.join(selected)}"
            completion = " ".join([*selected, *extra, str(number)])
            example = {"prompt": prompt, "completion": completion}
            stream.write(json.dumps(example) + "\n")


def _write_model(folder: Path) -> None:
    from lmx.config.model import ScratchModelConfig
    from lmx.models import from_scratch

    config = from_scratch.llama_config(
        ScratchModelConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=HIDDEN_SIZE,
            intermediate_size=2 * HIDDEN_SIZE,
            num_hidden_layers=1,
            num_attention_heads=1,
            dtype="float32",
        )
    )
    folder.mkdir()
    with tempfile.TemporaryDirectory() as scratch:
        texts = ["Repeat: north south river stone seven green 0123456789"] * 9
        from_scratch.train_tokenizer(texts, VOCAB_SIZE, Path(scratch))
        weights = from_scratch.initial_weights(config, 0)
        checkpoint_writer.write_checkpoint(
            folder, weights, config, companions=Path(scratch)
        )


def _start(arguments: argparse.Namespace) -> dict:
    """One start in the folder that `_measure` has prepared."""
    from lmx import cpu

    cpu.enable()
    from lmx.config.train import TrainConfig
    from lmx.data import cache
    from lmx.pipeline.train.batches import training_batches

    config = TrainConfig(
        steps=1, batch_size=arguments.batch_size, packing=arguments.packing
    )
    context = _context(arguments.start)
    loaded = context.load(context.base)
    tokenized = not (cache.root() / "tokens").exists()
    before, start = _peak_memory(), time.perf_counter()
    batches = training_batches(config, context, loaded, packing=config.packing)
    assert context.rows.valid
    seconds = time.perf_counter() - start
    batch_seconds = _time_batches(batches, arguments.steps)
    memory = _peak_memory() - before
    return {
        "tokenized": tokenized,
        "digest": batches.digest,
        "file": (arguments.start / "examples.jsonl").stat().st_size,
        "seconds": seconds,
        "memory": memory,
        "batch": batch_seconds,
        "speed": _tokens_per_second(batches, loaded, config, arguments.steps),
    }


def _context(folder: Path):
    from lmx.config.data import DataConfig
    from lmx.config.model import ModelConfig
    from lmx.data.splits import Splits
    from lmx.pipeline.context import StageContext
    from lmx.run.logger import RunLogger

    data = DataConfig(train=str(folder / "examples.jsonl"), max_seq_length=SEQ_LENGTH)
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


def _time_batches(batches, count: int) -> float:
    """Median seconds to make a batch; the first one also shuffles the epoch."""
    import mlx.core as mx

    seconds = []
    for number in range(count):
        start = time.perf_counter()
        mx.eval(batches(number).arrays[:2])
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _tokens_per_second(batches, loaded, config, count: int) -> float:
    """Trained tokens per second, batches included; the first step of a shape is not."""
    import mlx.core as mx
    from lmx.training.document_mask import DocumentCaches
    from lmx.training.step import TrainStep

    caches = DocumentCaches(loaded.model) if config.packing else None
    step = TrainStep(loaded.model, document_caches=caches)
    shapes, seconds, trained = set(), 0.0, 0
    for number in range(count):
        start = time.perf_counter()
        batch = batches(number)
        outputs = step(batch, 1e-4, number)
        mx.eval(outputs, step.parameters, step.optimizer.state)
        if batch.tokens.shape in shapes:
            seconds += time.perf_counter() - start
            trained += outputs[1].item()
        shapes.add(batch.tokens.shape)
    return trained / seconds if trained else 0.0


def _peak_memory() -> int:
    """Peak resident memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


if __name__ == "__main__":
    main()
