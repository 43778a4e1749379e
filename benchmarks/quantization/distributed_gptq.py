"""Measure GPTQ of several processes with one core each, beside one process on one core.

A Llama with random weights is quantized by the same recipe. The runs alternate, and
each is measured from the start of its processes to their end. The codes of both models
are compared. Cores are chosen on Linux only.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parents[1]))
import programs
import random_llama

# lmx-train with the number of its core before the arguments.
PROGRAM = """
import os, sys
core = int(sys.argv.pop(1))
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[core]})
from lmx.cli.main import train
sys.exit(train())
"""
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LMX_BLAS_THREADS")


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        folder = Path(scratch)
        write_inputs(folder, arguments)
        counts = {"1 process": 1}
        counts[f"{arguments.processes} processes"] = arguments.processes
        runs = programs.alternate(
            counts, arguments.repeats, lambda name: run(folder, counts[name])
        )
        _show(runs, folder, arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-size", type=int, default=384)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--effort", default="standard")
    parser.add_argument("--num-tokens", type=int, default=32768, help="calibration")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--folder", help="for all files; default: a temporary one")
    return parser.parse_args()


def write_inputs(folder: Path, arguments: argparse.Namespace) -> None:
    """Write the model and the recipe."""
    random_llama.write(folder, random_llama.configuration(arguments))
    stage = {
        "method": "gptq",
        "bits": arguments.bits,
        "effort": arguments.effort,
        "rollback_if_worse": False,
        "calibration": {
            "dataset": "builtin:stdlib",
            "num_tokens": arguments.num_tokens,
        },
    }
    recipe = {"model": str(folder / "model"), "stages": [{"quantize": stage}]}
    # JSON is valid YAML.
    (folder / "recipe.yaml").write_text(json.dumps(recipe))


def run(folder: Path, count: int) -> dict:
    """The seconds of a run of so many processes."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | dict.fromkeys(THREADS, "1")
    if count > 1:
        environment["MLX_HOSTFILE"] = str(_hostfile(folder, count))
    arguments = [folder / "recipe.yaml", f"output={folder / str(count)}"]
    start = time.perf_counter()
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-c", PROGRAM, str(rank)),
                *map(str, arguments),
                *("--restart", "--quiet"),
            ],
            env=environment | ({"MLX_RANK": str(rank)} if count > 1 else {}),
        )
        for rank in range(count)
    ]
    if any([process.wait() for process in processes]):
        sys.exit(f"a run of {count} processes failed")
    return {"seconds": time.perf_counter() - start}


def _hostfile(folder: Path, count: int) -> Path:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
    path = folder / "hosts.json"
    path.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    return path


def _show(
    runs: dict[str, list[dict]], folder: Path, arguments: argparse.Namespace
) -> None:
    seconds = {name: [run["seconds"] for run in each] for name, each in runs.items()}
    for name, values in seconds.items():
        print(f"{name:14}", *(f"{value:8.1f} s" for value in values))
    alone, together = (median(values) for values in seconds.values())
    print(f"{name} are {alone / together:.2f} times as fast as one")
    moved, total = _moved_codes(
        *(folder / str(count) for count in (1, arguments.processes)), arguments.bits
    )
    print(f"{moved:,} of {total:,} codes differ ({moved / total:.4%})")


def _moved_codes(first: Path, second: Path, bits: int) -> tuple[int, int]:
    """Codes that differ between the models of two runs, and all codes."""
    import mlx.core as mx
    from lmx.quantization.bit_packing import unpack_codes

    models = [
        mx.load(str(*output.glob("stages/*/model/model.safetensors")))
        for output in (first, second)
    ]
    moved = total = 0
    for name, words in models[0].items():
        if words.dtype == mx.uint32:
            codes, others = (unpack_codes(model[name], bits) for model in models)
            moved += (codes != others).sum().item()
            total += codes.size
    return moved, total


if __name__ == "__main__":
    main()
