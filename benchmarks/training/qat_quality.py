"""Measure the share of the RTN gap that quantization-aware training recovers.

Each method trains on the same examples and number of tokens as its full-precision
baseline. Test examples are used for evaluation only. Runs and results are kept, so the
same command resumes. `python data/make_skills.py FOLDER 116` makes a dataset with four
times as many test examples for `--data`.
"""

import argparse
import json
import os
import resource
import sys
import time
from itertools import islice
from pathlib import Path

import qat_table
from lmx.config.quant_spec import FLOAT_MODES
from qat_methods import DATA, GROUP_SIZE, METHODS, Grid, Method

sys.path.append(str(Path(__file__).parents[1]))
import programs

MAX_ANSWER_TOKENS = 64
HEADER = """\
{model}: {steps} steps of {batch_size} examples; {seeds} seeds. Affine grids have groups
of {group_size}.
recovered = (RTN - method) / (RTN - baseline), of the loss and of the KL to the baseline
on test examples, in nats per token; errors by pairs of examples for one seed, else by
seeds. late: fake quantization after {fp_fraction:.0%} of the steps; from codes: these
steps in full precision, then gptq, then QAT from its codes; distill: with the model
before gptq as teacher; after gptq: {extra_steps:.0%} more steps, without labels; minmax
and fixed_scale, distill: after all steps in full precision, as many with the baseline
as teacher. correct = exact match of the answers to test examples. CPU s = processor
time of the method, without that of its start model."""


def main() -> None:
    arguments = _arguments()
    print(HEADER.format(**vars(arguments), group_size=GROUP_SIZE))
    _require_same_settings(arguments)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    for seed in seeds:
        for method in METHODS:
            if arguments.methods and method.name not in arguments.methods:
                continue
            for grid in arguments.grids if method.grids else [None]:
                if grid is None or grid in method.grids:
                    get_result(method, seed, grid, arguments)
    for grid in arguments.grids:
        results = {
            method.name: [read_result(method, seed, grid, arguments) for seed in seeds]
            for method in METHODS
        }
        qat_table.print_tables(grid, METHODS, results)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(DATA / "tiny-base"))
    parser.add_argument(
        "--data", type=Path, default=DATA / "skills", help="train, valid, test .jsonl"
    )
    parser.add_argument("--max-seq-length", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--grids",
        type=lambda name: name if name in FLOAT_MODES else int(name),
        nargs="+",
        default=[4, 3, 2],
        help=f"affine bit widths, or {', '.join(FLOAT_MODES)}",
    )
    parser.add_argument("--steps", type=int, default=250, help="of every method")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--lora-learning-rate", type=float, default=1e-3)
    parser.add_argument(
        "--codes-learning-rate", type=float, default=3e-4, help="at 2 bits"
    )
    parser.add_argument(
        "--fp-fraction", type=float, default=0.9, help="of steps before gptq"
    )
    parser.add_argument(
        "--extra-steps", type=float, default=0.2, help="after gptq, a share of --steps"
    )
    parser.add_argument(
        "--answers", type=int, default=0, help="test examples to answer: exact match"
    )
    parser.add_argument("--ce-weight", type=float, default=0.0, help="with a teacher")
    parser.add_argument(
        "--num-calibration-tokens", type=int, default=262144, help="for gptq"
    )
    parser.add_argument("--effort", default="standard", choices=("fast", "standard"))
    parser.add_argument("--max-samples", type=int, help="per split; default: all")
    parser.add_argument(
        "--methods", nargs="+", choices=[method.name for method in METHODS]
    )
    parser.add_argument("--folder", type=Path, default=Path("exports/qat_quality"))
    return parser.parse_args()


def _require_same_settings(arguments: argparse.Namespace) -> None:
    """Exit if the folder has results of other settings."""
    ignored = ("seeds", "first_seed", "grids", "methods", "folder")
    settings = {key: v for key, v in vars(arguments).items() if key not in ignored}
    settings["data"] = str(arguments.data)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    file = arguments.folder / "settings.json"
    if not file.is_file():
        write(file, settings)
    if (stored := json.loads(file.read_text())) != settings:
        sys.exit(f"{arguments.folder} has results of other settings: {stored}")


def _run_folder(method: Method, seed: int, grid: Grid | None, arguments) -> Path:
    name = method.name.replace(",", "").replace(" ", "-")
    return arguments.folder / f"{seed}-{name}{f'-{grid}' if method.grids else ''}"


def read_result(method: Method, seed: int, grid: Grid | None, arguments) -> dict | None:
    """The stored result, or None."""
    file = _run_folder(method, seed, grid, arguments).with_suffix(".json")
    return json.loads(file.read_text()) if file.is_file() else None


def get_result(method: Method, seed: int, grid: Grid | None, arguments) -> dict:
    """The stored result, or run or resume the method and evaluate its model."""
    if stored := read_result(method, seed, grid, arguments):
        return stored
    folder = _run_folder(method, seed, grid, arguments)
    by_name = {m.name: m for m in METHODS}
    baseline, start = by_name[method.baseline], by_name.get(method.start)
    for other in (baseline, start):
        if other and other is not method:
            get_result(other, seed, grid if other.grids else None, arguments)
    if method is not baseline:
        arguments.baseline = _model(_run_folder(baseline, seed, None, arguments))
    model = arguments.model
    if start:
        model = _model(_run_folder(start, seed, grid, arguments))
    wall, cpu = time.perf_counter(), _child_cpu_seconds()
    facts = _run(folder, str(model), method, seed, grid, arguments)
    result = {
        "trained_loss": facts.get("validation_loss"),
        "seconds": time.perf_counter() - wall,
        "cpu": _child_cpu_seconds() - cpu,
    }
    model = _fuse(folder) if method.fused else _model(folder)
    reference = model if method is baseline else arguments.baseline
    result |= _evaluate(reference, model, arguments)
    write(folder.with_suffix(".json"), result)
    return result


def write(file: Path, value: dict) -> None:
    """Write JSON atomically."""
    # Other processes may write other seeds into the same folder.
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(value))
    part.replace(file)


def _child_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _run(folder: Path, model: str, method: Method, seed: int, grid, arguments) -> dict:
    """Run the recipe of a method; returns the facts of its last stage."""
    recipe = {
        "model": str(Path(model).absolute()) if Path(model).exists() else model,
        "data": {split: _file(split, arguments) for split in ("train", "valid")},
        "seed": seed,
        "stages": method.stages(arguments, grid),
    }
    recipe["data"] |= {
        "max_seq_length": arguments.max_seq_length,
        "max_samples": arguments.max_samples,
    }
    programs.run_recipe(recipe, folder)
    return _last_stage(folder)["result"]["facts"]


def _last_stage(folder: Path) -> dict:
    stages = json.loads((folder / "manifest.json").read_text())["stages"]
    return stages[max(stages, key=lambda name: int(name.partition("-")[0]))]


def _model(folder: Path) -> Path:
    return (folder / _last_stage(folder)["result"]["model"]).absolute()


def _fuse(folder: Path) -> Path:
    """Fuse the adapter with mlx_lm, which requantizes the sum."""
    target, quantized = folder / "fused", folder / "stages/1-quantize/model"
    command = ["--model", str(quantized), "--adapter-path", str(folder / "adapters")]
    programs.call(["-m", "mlx_lm.fuse", *command, "--save-path", target])
    return target.absolute()


def _file(split: str, arguments: argparse.Namespace) -> str:
    return str((arguments.data / f"{split}.jsonl").absolute())


def _evaluate(reference: Path, model: Path, arguments: argparse.Namespace) -> dict:
    """Sums by test example, and the mean loss on the validation examples."""
    from lmx import cpu

    cpu.enable()
    from lmx.evaluation.gap_recovery import measure_per_sequence
    from lmx.models.loader import load

    full, quantized = load(reference), load(model)
    test, valid = (_batches(full, split, arguments) for split in ("test", "valid"))
    sums = measure_per_sequence(full.model, quantized.model, test)
    valid_sums = measure_per_sequence(full.model, quantized.model, valid)
    lists = {name: values.tolist() for name, values in vars(sums).items()}
    return lists | {
        "valid_loss": valid_sums.means["loss"],
        "correct": _correct_answers(quantized, arguments),
    }


def _correct_answers(loaded, arguments: argparse.Namespace) -> list[int]:
    """1 or 0 for the answers to so many test examples, as an evaluate stage has it."""
    from lmx.api.model import Model
    from lmx.data.dataset import RecordReader
    from lmx.evaluation.exact_match import measure_exact_match
    from lmx.pipeline.evaluate.questions import Questions

    reader = RecordReader(_file("test", arguments), split="train")
    questions = Questions.choose(reader, 0, arguments.answers, "none")
    if not questions.exact:
        return []
    generator = Model(loaded).generator()
    questions.answer("model", generator, MAX_ANSWER_TOKENS, lambda _: None)
    return measure_exact_match(
        (q.skill, q.expected, q.answers["model"]) for q in questions.exact
    ).correct


def _batches(loaded, split: str, arguments: argparse.Namespace) -> list:
    from lmx.data.batching import BucketBatchSampler
    from lmx.data.dataset import RecordReader
    from lmx.data.tokenization import encode_all

    reader = RecordReader(_file(split, arguments), split="train")
    length = arguments.max_seq_length
    examples = list(islice(reader, arguments.max_samples))
    encoded = encode_all(examples, loaded.tokenizer, max_seq_length=length)
    batches = BucketBatchSampler(
        encoded.examples, max_seq_length=length, batch_tokens=4096
    )
    return list(batches.in_order())


if __name__ == "__main__":
    main()
