"""Compare PTQ with lmx and with mlx_lm's gptq, awq, dwq and dynamic_quant.

All methods get the same model, calibration tokens and bits per weight, and the same
evaluation. Each run is a separate process. mlx-lm's own functions run with our tokens
instead of the dataset that they download.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import ptq_divergence
import ptq_runners
from lmx.config.quant_spec import FLOAT_MODES
from ptq_table import print_table

DATA = Path(__file__).parents[1] / "data"
GROUP_SIZE = 64
SETTINGS = "settings.json"
# Pairs of widths for dynamic_quant; the best pair counts.
WIDTHS = {3.5: ((2, 4), (2, 5), (2, 6), (3, 4)), 4.5: ((3, 5), (3, 6), (3, 8), (4, 5))}
UNIFORM = ("2-64", "3-64", "4-64", "2-32", "3-32", "4-32")
CASES = (*UNIFORM, *FLOAT_MODES, *(f"{target}bpw" for target in WIDTHS))


@dataclass
class Method:
    """A method to quantize a model.

    Attributes:
        kind: single and cascade are mlx-lm's; untuned and tuned are lmx's.
        candidates: options to choose from; the lowest KL of the first seed wins.
        start: the method whose result this one continues from.
        seeded: whether the result depends on the calibration tokens.
    """

    name: str
    kind: str
    runner: str
    candidates: list[dict]
    start: str | None = None
    seeded: bool = True
    runs: list[dict] = field(default_factory=list)

    @property
    def chosen(self) -> str:
        """The selected options, if there was a choice."""
        words = {"learning_rate": "lr {:g}", "low": "{} and", "high": "{} bits"}
        options = self.candidates[0].items()
        return " ".join(words[key].format(v) for key, v in options if key in words)


def main() -> None:
    arguments = _arguments()
    print(
        f"{arguments.model}: {arguments.num_tokens:,} calibration tokens of "
        f"{arguments.calibration_data}, {arguments.num_eval_tokens:,} evaluation "
        f"tokens,\nsequences of {arguments.seq_length}, {arguments.seeds} seeds. KL in "
        "nats per token to the full-precision model in float32; ± is one\nstandard "
        "error by sequences. dwq runs with its defaults for one epoch, and with "
        f"{arguments.steps} steps of\n{arguments.batch_size} sequences, as lmx's scale "
        "tuning. Its learning rate then, and dynamic_quant's widths, are the best on\n"
        "the evaluation tokens. Embeddings and head have the same bits as all layers."
    )
    for case in arguments.cases:
        methods = [
            method
            for method in methods_for(case, arguments)
            if arguments.methods is None or method.name in arguments.methods
        ]
        with _folder(arguments.folder) as folder:
            for seed in range(arguments.seeds):
                _run_seed(Path(folder) / f"seed-{seed}", arguments, methods, seed, case)
        print_table(case, methods)


def _folder(path: str | None):
    return nullcontext(path) if path else tempfile.TemporaryDirectory()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(DATA / "tiny-base"))
    parser.add_argument("--calibration-data", default="builtin:stdlib")
    parser.add_argument(
        "--eval-data", help="default: the valid split of the calibration data"
    )
    parser.add_argument("--num-tokens", type=int, default=32768, help="calibration")
    parser.add_argument("--num-eval-tokens", type=int, default=16384)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument(
        "--seeds", type=int, default=3, help="of the calibration tokens"
    )
    parser.add_argument(
        "--steps", type=int, default=200, help="of scale tuning and dwq"
    )
    parser.add_argument("--batch-size", type=int, default=8, help="sequences")
    parser.add_argument(
        "--learning-rates",
        type=float,
        nargs="+",
        default=[1e-5, 1e-4, 3e-4, 1e-3],
        help="for dwq",
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--methods", nargs="+", help="names in the table; default: all")
    parser.add_argument("--threads", type=int, help="default: all cores")
    parser.add_argument(
        "--folder", help="keep all runs here; existing runs are not repeated"
    )
    return parser.parse_args()


def methods_for(case: str, arguments: argparse.Namespace) -> list[Method]:
    """All methods for a case: bits and group size, a mode, or bits per weight."""
    if case.endswith("bpw"):
        return _mixed_precision(float(case.removesuffix("bpw")), arguments)
    if case in FLOAT_MODES:
        return _floating_point(case)
    bits, group_size = map(int, case.split("-"))
    grid = {"bits": bits, "group_size": group_size}
    gptq = {"method": "gptq"} | grid
    default = grid | {"learning_rate": 1e-6, "batch": 4, "steps": 0}
    return [
        Method("rtn", "single", "rtn", [grid], seeded=False),
        Method("mlx gptq", "single", "gptq", [grid]),
        Method("mlx awq", "single", "awq", [grid]),
        Method("mlx dwq default", "single", "dwq", [default]),
        Method("mlx dwq", "single", "dwq", _dwq(grid, arguments)),
        Method("mlx gptq, dwq", "cascade", "dwq", _dwq(grid, arguments), "mlx gptq"),
        Method("lmx untuned", "untuned", "lmx", [gptq | {"scale_tuning": False}]),
        Method("lmx", "tuned", "lmx", [gptq | _scale_tuning(arguments)]),
    ]


def _floating_point(mode: str) -> list[Method]:
    group_size, bits = FLOAT_MODES[mode]
    grid = {"mode": mode, "bits": bits, "group_size": group_size}
    gptq = {"method": "gptq"} | grid
    return [
        Method("rtn", "single", "rtn", [grid], seeded=False),
        Method("lmx fast", "fast", "lmx", [gptq | {"effort": "fast"}]),
        Method("lmx untuned", "untuned", "lmx", [gptq]),
    ]


def _mixed_precision(target: float, arguments: argparse.Namespace) -> list[Method]:
    mixed = {"group_size": GROUP_SIZE, "target": target}
    widths = [mixed | {"low": low, "high": high} for low, high in WIDTHS[target]]
    gptq = {"method": "gptq", "group_size": GROUP_SIZE}
    gptq |= {"mixed_precision": {"target_bpw": target}}
    dwq = _dwq({"group_size": GROUP_SIZE}, arguments)
    return [
        Method("mlx dynamic", "single", "dynamic", widths),
        Method("mlx dynamic, dwq", "cascade", "dwq", dwq, "mlx dynamic"),
        Method("lmx untuned", "untuned", "lmx", [gptq | {"scale_tuning": False}]),
        Method("lmx", "tuned", "lmx", [gptq | _scale_tuning(arguments)]),
    ]


def _dwq(grid: dict, arguments: argparse.Namespace) -> list[dict]:
    steps = {"batch": arguments.batch_size, "steps": arguments.steps}
    rates = arguments.learning_rates
    return [grid | steps | {"learning_rate": rate} for rate in rates]


def _scale_tuning(arguments: argparse.Namespace) -> dict:
    tokens = arguments.batch_size * arguments.seq_length
    return {"scale_tuning": {"steps": arguments.steps, "batch_tokens": tokens}}


def _run_seed(
    folder: Path, arguments, methods: list[Method], seed: int, case: str
) -> None:
    (folder / case).mkdir(parents=True, exist_ok=True)
    prepare(folder, arguments, seed)
    done: dict[str, Path] = {}
    for method in methods:
        if seed and not method.seeded:
            method.runs.append(method.runs[0])
            continue
        if method.start and method.start not in done:
            method.runs.append({"failed": f"{method.start} failed"})
            continue
        runs = []
        for options in method.candidates:
            if method.start:
                options = options | {"start": str(done[method.start])}
            runs.append(_run_once(folder, case, method, options, arguments))
        _evaluate([run for run in runs if not run["failed"]], folder, arguments)
        best = min(runs, key=lambda run: run["kl"].mean() if "kl" in run else 1e9)
        method.candidates = [method.candidates[runs.index(best)]]
        method.runs.append(best)
        if not best["failed"]:
            done[method.name] = Path(best["folder"])


def _run_once(
    folder: Path, case: str, method: Method, options: dict, arguments
) -> dict:
    """Run a method, or return the stored result of the same run."""
    key = (folder / SETTINGS).read_text() + json.dumps(options)
    digest = hashlib.sha256(key.encode()).hexdigest()[:8]
    target = folder / case / f"{method.name.replace(' ', '-')}-{digest}"
    record = target.with_suffix(".json")
    if not record.is_file():
        run = call_runner(method.runner, folder, target, options, arguments.threads)
        record.write_text(json.dumps(run))
    return json.loads(record.read_text())


def prepare(folder: Path, arguments: argparse.Namespace, seed: int) -> None:
    """Write the inputs of the runs and of the evaluation."""
    import numpy as np
    from lmx.convert.importers import resolve_checkpoint

    model = resolve_checkpoint(arguments.model).resolve()
    source, length = arguments.calibration_data, arguments.seq_length
    write_inputs(folder, model, source, arguments.num_tokens, length, seed)
    data = (arguments.eval_data, "train") if arguments.eval_data else (source, "valid")
    tokens = _tokens(model, *data, arguments.num_eval_tokens, length, seed=0)
    np.save(folder / "eval.npy", tokens)


def write_inputs(
    folder: Path,
    model: Path,
    source: str,
    tokens: int,
    length: int,
    seed: int,
    *,
    split_eval: bool = True,
) -> None:
    """Write the inputs of the runs: calibration tokens and their source.

    Args:
        split_eval: lmx evaluates its steps on an eighth of these tokens.
    """
    import numpy as np

    calibration = _tokens(model, source, "train", tokens, length, seed)
    np.save(folder / "calibration.npy", calibration)
    config = {
        "dataset": source,
        "max_seq_length": length,
        "num_tokens": calibration.size,
    }
    if split_eval:
        config["num_eval_tokens"] = max(1, len(calibration) // 8) * length
        config["num_tokens"] -= config["num_eval_tokens"]
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
    command = [runner, str(folder), str(target), json.dumps(options)]
    output = call_program([str(ptq_runners.PROGRAM), *command], threads)
    # mlx-lm prints its own report before this line.
    return json.loads(output.splitlines()[-1]) | {"folder": str(target)}


def _evaluate(runs: list[dict], folder: Path, arguments: argparse.Namespace) -> None:
    import numpy as np

    model = json.loads((folder / SETTINGS).read_text())["model"]
    files = {run["folder"]: Path(run["folder"]) / ptq_divergence.RESULT for run in runs}
    missing = [path for path, file in files.items() if not file.is_file()]
    if missing:
        command = [model, str(folder / "eval.npy"), *missing]
        call_program([str(ptq_divergence.PROGRAM), *command], arguments.threads)
    for run in runs:
        run |= np.load(files[run["folder"]])


def call_program(command: list[str], threads: int | None) -> str:
    """Run a Python program and return its output; exit if it fails."""
    environment = dict(os.environ)
    for name in ("LMX_BLAS_THREADS", "OMP_NUM_THREADS") if threads else ():
        environment[name] = str(threads)
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
