"""Post-training quantization by lmx and by mlx_lm's gptq, awq, dwq and dynamic_quant.

The same model, calibration tokens, bits per weight and judge. Every run is a process of
its own; every peer is called by its own functions, with our tokens instead of the data
set it would download.
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

import ptq_judge
import ptq_sides
from ptq_table import print_table

DATA = Path(__file__).parents[1] / "data"
GROUP = 64
SETTINGS = "settings.json"
# What dynamic_quant mixes: of all pairs around a target the best is taken.
LEVELS = {3.5: ((2, 4), (2, 5), (2, 6), (3, 4)), 4.5: ((3, 5), (3, 6), (3, 8), (4, 5))}
UNIFORM = ("2-64", "3-64", "4-64", "2-32", "3-32", "4-32")
CASES = (*UNIFORM, *(f"{target}bpw" for target in LEVELS))


@dataclass
class Route:
    """A way to quantize.

    Attributes:
        kind: single and cascade are mlx-lm's, closed and whole are ours.
        ladder: options to choose from; the best for the judge on the first seed stays.
        start: the route whose result this goes on with.
        seeded: whether calibration changes it.
    """

    name: str
    kind: str
    side: str
    ladder: list[dict]
    start: str | None = None
    seeded: bool = True
    runs: list[dict] = field(default_factory=list)

    @property
    def chosen(self) -> str:
        """What was chosen, if there was a choice."""
        words = {"rate": "rate {:g}", "low": "{} and", "high": "{} bits"}
        found = [words[k].format(v) for k, v in self.ladder[0].items() if k in words]
        return " ".join(found)


def main() -> None:
    arguments = _arguments()
    print(
        f"{arguments.model}: {arguments.tokens:,} calibration tokens of "
        f"{arguments.calibration}, {arguments.held_out_tokens:,} held out,\n"
        f"windows of {arguments.length}, {arguments.seeds} seeds. KL in nats a token "
        "to the full-precision model in float32; ± is one\nstandard error by windows. "
        "dwq is run with its defaults, for an epoch of these tokens, and with "
        f"{arguments.steps} steps of\n{arguments.batch} windows, as lmx's tuning; its "
        "rate then, and dynamic_quant's widths, are the best of a ladder\non the "
        "held-out text itself. Embeddings and head have the width of all else."
    )
    for case in arguments.cases:
        routes = [
            route
            for route in routes_of(case, arguments)
            if arguments.routes is None or route.name in arguments.routes
        ]
        with _folder(arguments.folder) as folder:
            for seed in range(arguments.seeds):
                _run_seed(Path(folder) / f"seed-{seed}", arguments, routes, seed, case)
        print_table(case, routes)


def _folder(chosen: str | None):
    return nullcontext(chosen) if chosen else tempfile.TemporaryDirectory()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(DATA / "tiny-base"))
    parser.add_argument("--calibration", default="builtin:stdlib", help="a source")
    parser.add_argument("--held-out", help="a source; absent = the other's split valid")
    parser.add_argument("--tokens", type=int, default=32768, help="to calibrate on")
    parser.add_argument("--held-out-tokens", type=int, default=16384)
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--seeds", type=int, default=3, help="of the calibration")
    parser.add_argument("--steps", type=int, default=200, help="of tuning and of dwq")
    parser.add_argument("--batch", type=int, default=8, help="windows of a step")
    rates = [1e-5, 1e-4, 3e-4, 1e-3]
    parser.add_argument("--rates", type=float, nargs="+", default=rates, help="of dwq")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--routes", nargs="+", help="names in the table; absent = all")
    parser.add_argument("--threads", type=int, help="of every side; absent = all")
    parser.add_argument(
        "--folder", help="keeps every run; what is there is not run again"
    )
    return parser.parse_args()


def routes_of(case: str, arguments: argparse.Namespace) -> list[Route]:
    """All ways to quantize in a case: of bits and group size, or of a budget."""
    if case.endswith("bpw"):
        return _of_budget(float(case.removesuffix("bpw")), arguments)
    bits, group = map(int, case.split("-"))
    grid = {"bits": bits, "group_size": group}
    ours = {"method": "gptq"} | grid
    default = grid | {"rate": 1e-6, "batch": 4, "steps": 0}
    return [
        Route("rtn", "single", "rtn", [grid], seeded=False),
        Route("mlx gptq", "single", "gptq", [grid]),
        Route("mlx awq", "single", "awq", [grid]),
        Route("mlx dwq default", "single", "dwq", [default]),
        Route("mlx dwq", "single", "dwq", _ladder(grid, arguments)),
        Route("mlx gptq, dwq", "cascade", "dwq", _ladder(grid, arguments), "mlx gptq"),
        Route("lmx closed form", "closed", "lmx", [ours | {"scale_tuning": False}]),
        Route("lmx", "whole", "lmx", [ours | _tuning(arguments)]),
    ]


def _of_budget(target: float, arguments: argparse.Namespace) -> list[Route]:
    mixed = {"group_size": GROUP, "target": target}
    levels = [mixed | {"low": low, "high": high} for low, high in LEVELS[target]]
    ours = {"method": "gptq", "group_size": GROUP}
    ours |= {"mixed_precision": {"target_bpw": target}}
    ladder = _ladder({"group_size": GROUP}, arguments)
    return [
        Route("mlx dynamic", "single", "dynamic", levels),
        Route("mlx dynamic, dwq", "cascade", "dwq", ladder, "mlx dynamic"),
        Route("lmx closed form", "closed", "lmx", [ours | {"scale_tuning": False}]),
        Route("lmx", "whole", "lmx", [ours | _tuning(arguments)]),
    ]


def _ladder(grid: dict, arguments: argparse.Namespace) -> list[dict]:
    steps = {"batch": arguments.batch, "steps": arguments.steps}
    return [grid | steps | {"rate": rate} for rate in arguments.rates]


def _tuning(arguments: argparse.Namespace) -> dict:
    tokens = arguments.batch * arguments.length
    return {"scale_tuning": {"steps": arguments.steps, "batch_tokens": tokens}}


def _run_seed(
    folder: Path, arguments, routes: list[Route], seed: int, case: str
) -> None:
    (folder / case).mkdir(parents=True, exist_ok=True)
    prepare(folder, arguments, seed)
    done: dict[str, Path] = {}
    for route in routes:
        if seed and not route.seeded:
            route.runs.append(route.runs[0])
            continue
        if route.start and route.start not in done:
            route.runs.append({"failed": f"there is no {route.start} to begin with"})
            continue
        tried = []
        for options in route.ladder:
            if route.start:
                options = options | {"start": str(done[route.start])}
            tried.append(_once(folder, case, route, options, arguments))
        _judge([run for run in tried if not run["failed"]], folder, arguments)
        best = min(tried, key=lambda run: run["kl"].mean() if "kl" in run else 1e9)
        route.ladder = [route.ladder[tried.index(best)]]
        route.runs.append(best)
        if not best["failed"]:
            done[route.name] = Path(best["folder"])


def _once(folder: Path, case: str, route: Route, options: dict, arguments) -> dict:
    """A run, or what it measured when it was made before with all the same."""
    key = (folder / SETTINGS).read_text() + json.dumps(options)
    digest = hashlib.sha256(key.encode()).hexdigest()[:8]
    target = folder / case / f"{route.name.replace(' ', '-')}-{digest}"
    record = target.with_suffix(".json")
    if not record.is_file():
        run = call_side(route.side, folder, target, options, arguments.threads)
        record.write_text(json.dumps(run))
    return json.loads(record.read_text())


def prepare(folder: Path, arguments: argparse.Namespace, seed: int) -> None:
    """Write into `folder` what every side and the judge read."""
    import numpy as np
    from lmx.convert.importers import resolve_checkpoint

    model, length = resolve_checkpoint(arguments.model).resolve(), arguments.length
    source = arguments.calibration
    write_inputs(folder, model, source, arguments.tokens, length, seed)
    apart = (arguments.held_out, "train") if arguments.held_out else (source, "valid")
    held_out = _tokens(model, *apart, arguments.held_out_tokens, length, seed=0)
    np.save(folder / "held-out.npy", held_out)


def write_inputs(
    folder: Path,
    model: Path,
    source: str,
    tokens: int,
    length: int,
    seed: int,
    *,
    judged: bool = True,
) -> None:
    """What every side reads: calibration tokens, and where they are from.

    Args:
        judged: lmx sets a part of these tokens aside, to judge its steps by.
    """
    import numpy as np

    calibration = _tokens(model, source, "train", tokens, length, seed)
    np.save(folder / "calibration.npy", calibration)
    taken = {
        "dataset": source,
        "max_seq_length": length,
        "num_tokens": calibration.size,
    }
    if judged:
        taken["held_out"] = max(1, len(calibration) // 8) * length
        taken["tokens"] -= taken["held_out"]
    settings = {"model": str(model), "seed": seed, "windows": taken}
    (folder / SETTINGS).write_text(json.dumps(settings))


def _tokens(model: Path, source: str, split: str, count: int, length: int, seed: int):
    """Windows of a source, as lmx takes them: int32 [n, length]."""
    from lmx.data.calibration import concatenated_sequences
    from lmx.data.dataset import RowReader
    from lmx.models.loader import load_tokenizer

    rows, tokenizer = RowReader(source, split=split), load_tokenizer(model)
    return concatenated_sequences(
        rows, tokenizer, length=length, tokens=count, seed=seed
    ).tokens


def call_side(
    side: str, folder: Path, target: Path, options: dict, threads: int | None
) -> dict:
    """Run one side in a process of its own; returns what it measured."""
    given = [side, str(folder), str(target), json.dumps(options)]
    output = _call([str(ptq_sides.PROGRAM), *given], threads)
    # mlx-lm writes its own report before it.
    return json.loads(output.splitlines()[-1]) | {"folder": str(target)}


def _judge(runs: list[dict], folder: Path, arguments: argparse.Namespace) -> None:
    import numpy as np

    model = json.loads((folder / SETTINGS).read_text())["model"]
    judged = {run["folder"]: Path(run["folder"]) / ptq_judge.JUDGED for run in runs}
    missing = [place for place, file in judged.items() if not file.is_file()]
    if missing:
        given = [model, str(folder / "held-out.npy"), *missing]
        _call([str(ptq_judge.PROGRAM), *given], arguments.threads)
    for run in runs:
        run |= np.load(judged[run["folder"]])


def _call(command: list[str], threads: int | None) -> str:
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
