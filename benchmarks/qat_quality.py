"""What quantization-aware training wins back of the loss that rounding costs.

Every route trains on as many tokens as its twin in full precision, of the same rows,
and is judged on the same test rows, by which nothing was chosen. A result is kept, and
so is every run, so that the same command goes on after it was stopped. For `--rows`,
`python data/make_skills.py FOLDER 116` makes four times as many to judge by.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import qat_table
from qat_routes import AFTER, DATA, GROUP, ROUTES, Route

HEAD = """\
{model}: {steps} steps of {batch} rows, groups of {group}; {seeds} seeds.
recovered = (rtn of the twin - route) / (rtn of the twin - twin), of the loss and of the
KL to the twin on test rows, in nats a token; errors by rows in pairs of one seed, else
by seeds. late: after {share:.0%} of the steps; from codes: these in full precision,
gptq, the rest from its codes; taught: these towards what the model predicted before
gptq; after gptq: {after:.0%} more steps, without labels. CPU s = processor time of the
route alone, without what it begins with."""


def main() -> None:
    arguments = _arguments()
    print(HEAD.format(**vars(arguments), group=GROUP, after=AFTER))
    _require_same(arguments)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    for seed in seeds:
        for route in ROUTES:
            for bits in arguments.bits if route.bits else [None]:
                wanted = bits is None or bits in route.bits
                if wanted and (not arguments.routes or route.name in arguments.routes):
                    result(route, seed, bits, arguments)
    for bits in arguments.bits:
        results = {
            route.name: [read(route, seed, bits, arguments) for seed in seeds]
            for route in ROUTES
        }
        qat_table.print_tables(bits, ROUTES, results)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(DATA / "tiny-base"))
    parser.add_argument(
        "--rows", type=Path, default=DATA / "skills", help="train, valid, test .jsonl"
    )
    parser.add_argument("--max-length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3, 2])
    parser.add_argument("--steps", type=int, default=250, help="of every route")
    parser.add_argument("--batch", type=int, default=64, help="rows a step")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate")
    parser.add_argument("--lora-rate", type=float, default=1e-3)
    parser.add_argument("--codes-rate", type=float, default=3e-4, help="at 2 bits")
    parser.add_argument("--share", type=float, default=0.9, help="of steps before gptq")
    parser.add_argument("--cross-entropy", type=float, default=0.0, help="when taught")
    parser.add_argument("--tune", type=int, default=200, help="steps after gptq")
    parser.add_argument(
        "--calibration", type=int, default=262144, help="tokens of gptq"
    )
    parser.add_argument("--limit", type=int, help="rows of each kind; absent = all")
    parser.add_argument("--routes", nargs="+", choices=[route.name for route in ROUTES])
    parser.add_argument("--folder", type=Path, default=Path("exports/qat_quality"))
    return parser.parse_args()


def _require_same(arguments: argparse.Namespace) -> None:
    """What is in the folder must have the settings that all of it will have."""
    free = ("seeds", "first_seed", "bits", "routes", "folder")
    asked = {key: v for key, v in vars(arguments).items() if key not in free}
    asked["rows"] = str(arguments.rows)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    file = arguments.folder / "settings.json"
    if not file.is_file():
        write(file, asked)
    if (kept := json.loads(file.read_text())) != asked:
        sys.exit(f"{arguments.folder} has results of other settings: {kept}")


def _place(route: Route, seed: int, bits: int | None, arguments) -> Path:
    name = route.name.replace(",", "").replace(" ", "-")
    return arguments.folder / f"{seed}-{name}{f'-{bits}' if route.bits else ''}"


def read(route: Route, seed: int, bits: int | None, arguments) -> dict | None:
    """A result that was kept, if there is one."""
    file = _place(route, seed, bits, arguments).with_suffix(".json")
    return json.loads(file.read_text()) if file.is_file() else None


def result(route: Route, seed: int, bits: int | None, arguments) -> dict:
    """Run a route, or go on with it, and judge it; or what was kept of it."""
    if kept := read(route, seed, bits, arguments):
        return kept
    place = _place(route, seed, bits, arguments)
    twin = next(r for r in ROUTES if r.name == route.twin)
    start = next((r for r in ROUTES if r.name == route.start), None)
    needed = {r.name: r for r in (twin, start) if r and r is not route}
    for other in needed.values():
        result(other, seed, bits if other.bits else None, arguments)
    if route is not twin:
        arguments.twin = _model(_place(twin, seed, None, arguments))
    origin = start and _model(_place(start, seed, bits, arguments))
    began, busy = time.perf_counter(), _children()
    facts = _run(place, str(origin or arguments.model), route, seed, bits, arguments)
    spent = {"seconds": time.perf_counter() - began, "cpu": _children() - busy}
    model = _fused(place) if route.fused else _model(place)
    found = {"trained_loss": facts.get("validation_loss")} | spent
    reference = model if route is twin else arguments.twin
    found |= _judged(reference, model, arguments)
    write(place.with_suffix(".json"), found)
    return found


def write(file: Path, value: dict) -> None:
    """Write JSON, whole or not at all."""
    # Other seeds may be run beside this one, into the same folder.
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(value))
    part.replace(file)


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run(place: Path, model: str, route: Route, seed: int, bits, arguments) -> dict:
    """Run the recipe of a route; what its last stage tells."""
    recipe = {
        "model": str(Path(model).absolute()) if Path(model).exists() else model,
        "data": {split: _file(split, arguments) for split in ("train", "valid")},
        "seed": seed,
        "output": str(place.absolute()),
        "stages": route.stages(arguments, bits),
    }
    recipe["data"] |= {
        "max_seq_length": arguments.max_seq_length,
        "max_samples": arguments.limit,
    }
    file = place.with_suffix(".yaml")
    file.write_text(json.dumps(recipe))
    _call(
        "from lmx.cli.main import train",
        "train",
        [str(file), "--quiet", "--ignore-limits"],
    )
    return _last(place)["facts"]["facts"]


def _last(place: Path) -> dict:
    stages = json.loads((place / "manifest.json").read_text())["stages"]
    return stages[max(stages, key=lambda name: int(name.partition("-")[0]))]


def _model(place: Path) -> Path:
    return (place / _last(place)["facts"]["model"]).absolute()


def _fused(place: Path) -> Path:
    """The adapter put into the codes by mlx_lm, which rounds their sum anew."""
    target, quantized = place / "fused", place / "stages/1-quantize/model"
    given = ["--model", str(quantized), "--adapter-path", str(place / "adapters")]
    _call("from mlx_lm.fuse import main", "main", [*given, "--save-path", str(target)])
    return target.absolute()


def _call(imports: str, name: str, arguments: list[str]) -> None:
    program = f"import sys\n{imports}\nsys.exit({name}())"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")


def _file(split: str, arguments: argparse.Namespace) -> str:
    return str((arguments.rows / f"{split}.jsonl").absolute())


def _judged(twin: Path, model: Path, arguments: argparse.Namespace) -> dict:
    """Sums by test row, and the mean loss on the validation rows."""
    from lmx import cpu

    cpu.enable()
    from lmx.evaluation.gap_recovery import measure_per_sequence
    from lmx.models.loader import load

    full, found = load(twin), load(model)
    test, valid = (_batches(full, split, arguments) for split in ("test", "valid"))
    sums = measure_per_sequence(full.model, found.model, test)
    others = measure_per_sequence(full.model, found.model, valid)
    lists = {name: values.tolist() for name, values in vars(sums).items()}
    return lists | {"valid_loss": others.means["loss"]}


def _batches(loaded, split: str, arguments: argparse.Namespace) -> list:
    from lmx.data.batching import BucketBatchSampler
    from lmx.data.dataset import RowReader
    from lmx.data.tokenization import encode_all

    rows, length = (
        RowReader(_file(split, arguments), split="train"),
        arguments.max_seq_length,
    )
    rows = list(islice(rows, arguments.limit))
    encoded = encode_all(rows, loaded.tokenizer, max_seq_length=length)
    batches = BucketBatchSampler(encoded.examples, max_seq_length=length, tokens=4096)
    return list(batches.in_order())


if __name__ == "__main__":
    main()
