"""What all PTQ methods get: a model, calibration tokens and evaluation tokens."""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import ptq_runners

sys.path.append(str(Path(__file__).parents[1]))
import programs

SETTINGS = "settings.json"


def prepare(folder: Path, arguments: argparse.Namespace, seed: int) -> None:
    """Write the inputs of the runs and of the evaluation."""
    from lmx.convert.importers import resolve_checkpoint

    model = resolve_checkpoint(arguments.model).resolve()
    source, length = arguments.calibration_data, arguments.seq_length
    write_inputs(folder, model, source, arguments.num_tokens, length, seed)
    data = (arguments.eval_data, "train") if arguments.eval_data else (source, "valid")
    tokens = _tokens(model, *data, arguments.num_eval_tokens, length, seed=0)
    np.save(folder / "eval.npy", tokens)


def write_inputs(
    folder: Path, model: Path, source: str, tokens: int, length: int, seed: int
) -> None:
    """Write the inputs of the runs: calibration tokens and their source.

    lmx evaluates its steps on an eighth of these tokens.
    """
    calibration = _tokens(model, source, "train", tokens, length, seed)
    np.save(folder / "calibration.npy", calibration)
    held_out = max(1, len(calibration) // 8) * length
    config = {
        "dataset": source,
        "max_seq_length": length,
        "num_tokens": calibration.size - held_out,
        "num_eval_tokens": held_out,
    }
    settings = {"model": str(model), "seed": seed, "calibration": config}
    (folder / SETTINGS).write_text(json.dumps(settings))


def _tokens(model: Path, source: str, split: str, count: int, length: int, seed: int):
    """Sequences of a source as lmx makes them, int32 [n, length]."""
    from lmx.data.calibration import concatenated_sequences
    from lmx.data.dataset import RecordReader
    from lmx.models.loader import load_tokenizer

    source, tokenizer = RecordReader(source, split=split), load_tokenizer(model)
    return concatenated_sequences(
        source, tokenizer, length=length, tokens=count, seed=seed
    ).tokens


def call_runner(
    runner: str, folder: Path, target: Path, options: dict, threads: int | None
) -> dict:
    """Run one method in a separate process and return its measurements."""
    command = [ptq_runners.PROGRAM, runner, folder, target, json.dumps(options)]
    return programs.measure(command, threads) | {"folder": str(target)}
