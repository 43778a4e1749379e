"""A teacher with another tokenizer against cross-entropy on the same tokens.

The student is trained in full on the same examples in the same order: on the labels, on
the teacher's predictions, and on half of both losses. The table has the cross-entropy
on held-out examples in nats per token of the student, and the difference from training
on the labels with its standard error over the seeds, which pairs runs of one seed.

A run stays in `--folder`, so a second call runs only what is missing. The teacher
predicts once for all runs.
"""

import argparse
import json
import sys
from itertools import islice
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
import gsm8k
import programs

# The weight of the labels beside a teacher; None = no teacher.
ROWS = {"cross-entropy": None, "both": 0.5, "teacher": 0.0}
# Batches with the teacher's predictions; the cross-entropy is of as many.
EVAL_BATCHES = 4
ROW = "{:16}{:>9}{:>9}{:>11}{:>9}   {}"


def main() -> None:
    arguments = _arguments()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    losses = {
        name: np.array([_train(name, seed, arguments) for seed in arguments.seeds])
        for name in ROWS
    }
    print(ROW.format("row", "loss", "ppl", "difference", "±", "by seed"))
    for name, values in losses.items():
        differences = values - losses["cross-entropy"]
        error = differences.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0
        cells = (values.mean(), np.exp(values.mean()), differences.mean(), error)
        seeds = " ".join(f"{value:.4f}" for value in values)
        print(ROW.format(name, *(f"{cell:.4f}" for cell in cells), seeds))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="keeps all runs")
    parser.add_argument("--teacher", type=Path, required=True, help="folder of a model")
    parser.add_argument(
        "--student", type=Path, default=programs.DATA / "tiny-base", help="a folder"
    )
    parser.add_argument(
        "--train", type=Path, required=True, help=".txt, or .jsonl of GSM8K"
    )
    parser.add_argument("--valid", type=Path, required=True, help="the same")
    parser.add_argument(
        "--size", type=int, default=60_000, help="characters of text; rows of .jsonl"
    )
    parser.add_argument("--valid-size", type=int, default=20_000, help="the same")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seq-length", type=int, default=256)
    return parser.parse_args()


def _train(name: str, seed: int, arguments: argparse.Namespace) -> float:
    """The held-out cross-entropy after training."""
    teacher = {"model": str(arguments.teacher.resolve()), "offline": True}
    stage = {
        "epochs": arguments.epochs,
        "batch_size": arguments.batch_size,
        "learning_rate": arguments.learning_rate,
        "eval_batches": EVAL_BATCHES,
        "eval_steps": 1_000_000,
        "save_steps": 1_000_000,
    }
    if (weight := ROWS[name]) is not None:
        stage["teacher"] = teacher | {"ce_weight": weight}
    recipe = {
        "model": str(arguments.student.resolve()),
        "seed": seed,
        "data": {
            "train": _part(arguments.train, arguments.size, "train", arguments),
            "valid": _part(arguments.valid, arguments.valid_size, "valid", arguments),
            "max_seq_length": arguments.seq_length,
        },
        "stages": [{"train": stage}],
    }
    output = programs.run_recipe(recipe, arguments.folder / f"{name}-{seed}")
    (stage,) = json.loads((output / "manifest.json").read_text())["stages"].values()
    return stage["result"]["facts"]["validation_loss"]


def _part(source: Path, size: int, name: str, arguments: argparse.Namespace) -> str:
    """A file with the start of a source; rows become chats."""
    target = (arguments.folder / name).with_suffix(source.suffix)
    with source.open(encoding="utf-8") as stream:
        if source.suffix == ".txt":
            text = stream.read(size)
        else:
            text = "".join(map(_chat, islice(stream, size)))
    target.write_text(text, encoding="utf-8")
    return str(target.resolve())


def _chat(line: str) -> str:
    return json.dumps(gsm8k.chat(json.loads(line))) + "\n"


if __name__ == "__main__":
    main()
