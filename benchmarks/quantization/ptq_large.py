"""Measure the memory to quantize a model that is larger than this memory.

A Llama with 1.5 billion random weights is written to disk and quantized with gptq. The
run is killed with SIGKILL when half of the blocks are done, and resumed. Each run is a
separate process; the table has its peak resident memory.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import programs
import random_llama

# lmx-train with "train RECIPE ...". "kill BLOCKS RECIPE ..." kills its own process when
# so many blocks are done: a signal from outside comes too late for a small model.
LMX = """
import os, signal, sys
from lmx.cli.main import train
from lmx.quantization.ptq.sequential import SequentialPipeline

command, *arguments = sys.argv[1:]
if command == "kill":
    kill_at, quantize_block = int(arguments.pop(0)), SequentialPipeline._quantize_block

    def quantize_or_kill(pipeline, index, progress):
        if index == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        quantize_block(pipeline, index, progress)

    SequentialPipeline._quantize_block = quantize_or_kill
sys.exit(train(arguments))
"""
ROW = "{:14}{:>9}{:>10}{:>11}{:>9}"
BLOCKS = "stages/*/scratch/**/[0-9]*/tensors.safetensors"


def main() -> None:
    arguments = _arguments()
    if arguments.write:
        write_inputs(Path(arguments.write), arguments)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        folder = Path(scratch)
        programs.call([__file__, *sys.argv[1:], "--write", folder])
        _measure(folder, arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--intermediate-size", type=int, default=5632)
    parser.add_argument("--num-layers", type=int, default=32)
    parser.add_argument("--num-heads", type=int, default=32)
    parser.add_argument("--num-key-value-heads", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--num-tokens", type=int, default=8192, help="calibration")
    parser.add_argument("--refine-iters", type=int, default=3)
    parser.add_argument("--threads", type=int, help="BLAS threads; default: all cores")
    parser.add_argument("--folder", help="for all files; default: a temporary one")
    parser.add_argument(
        "--uninterrupted", action="store_true", help="compare with a run without kill"
    )
    parser.add_argument("--write", help=argparse.SUPPRESS)
    return parser.parse_args()


def write_inputs(folder: Path, arguments: argparse.Namespace) -> None:
    """Write the model and the recipe. Weights are computed one at a time."""
    config = random_llama.configuration(
        arguments,
        intermediate_size=arguments.intermediate_size,
        num_attention_heads=arguments.num_heads,
        num_key_value_heads=arguments.num_key_value_heads,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    random_llama.write(folder, config)
    calibration = {"dataset": "builtin:stdlib", "num_tokens": arguments.num_tokens}
    stage = {"method": "gptq", "bits": arguments.bits, "calibration": calibration}
    # It runs the whole model, which does not fit.
    stage |= {"rollback_if_worse": False, "refine_iters": arguments.refine_iters}
    recipe = {"model": str(folder / "model"), "stages": [{"quantize": stage}]}
    # JSON is valid YAML.
    (folder / "recipe.yaml").write_text(json.dumps(recipe))


@dataclass
class Run:
    """Measurements of a quantization process.

    Attributes:
        seconds: wall-clock time.
        peak: peak resident memory in bytes.
        read: bytes read from the disk or its cache; None if the system does not count.
        blocks: quantized blocks on the disk at the end.
    """

    seconds: float
    peak: int
    read: int | None
    blocks: int


def run(
    folder: Path, output: str, arguments: argparse.Namespace, kill_at: int | None = None
) -> Run:
    """Quantize in a process that is killed when `kill_at` blocks are done."""
    command = ["train"] if kill_at is None else ["kill", str(kill_at)]
    command += [str(folder / "recipe.yaml"), f"output={folder / output}", "--quiet"]
    start = time.perf_counter()
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    if arguments.threads:
        environment["LMX_BLAS_THREADS"] = str(arguments.threads)
    process = subprocess.Popen([sys.executable, "-c", LMX, *command], env=environment)
    read = None
    while True:
        read = _bytes_read(process.pid) or read
        finished, status, usage = os.wait4(process.pid, os.WNOHANG)
        if finished:
            break
        time.sleep(0.01)
    killed = os.WIFSIGNALED(status)
    assert killed == (kill_at is not None), f"exit status {status}"
    assert killed or os.WEXITSTATUS(status) == 0
    process.returncode = os.waitstatus_to_exitcode(status)
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    seconds = time.perf_counter() - start
    return Run(seconds, peak, read, _quantized_blocks(folder / output))


def _quantized_blocks(output: Path) -> int:
    """Blocks of the finished model, else finished blocks of the interrupted stage."""
    from lmx.models.safetensors_io import read_header

    models = [*output.glob("stages/*/model/model.safetensors")]
    if not models:
        return len([*output.glob(BLOCKS)])
    names = [name.split(".") for name in read_header(models[0])]
    return len({n[2] for n in names if n[1] == "layers" and n[-1] == "scales"})


def _bytes_read(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(x.split()[1]) for x in lines if x.startswith("rchar")), None)


def _measure(folder: Path, arguments: argparse.Namespace) -> None:
    size = sum(f.stat().st_size for f in (folder / "model").glob("*.safetensors"))
    print(f"{size / 1e9:.2f} GB of weights in {arguments.num_layers} blocks, bfloat16")
    print(ROW.format("run", "seconds", "peak GB", "read GB", "blocks"))
    half = max(1, arguments.num_layers // 2)
    _show("killed", run(folder, "run", arguments, kill_at=half))
    _show("resumed", run(folder, "run", arguments))
    digest = _digest(folder / "run")
    print(f"sha256 of the weights {digest}")
    if arguments.uninterrupted:
        _show("uninterrupted", run(folder, "uninterrupted", arguments))
        is_equal = _digest(folder / "uninterrupted") == digest
        print("the resumed run has", "the same bytes" if is_equal else "OTHER BYTES")
        if not is_equal:
            sys.exit(1)


def _show(name: str, run: Run) -> None:
    read = "-" if run.read is None else f"{run.read / 1e9:.2f}"
    peak = f"{run.peak / 1e9:.2f}"
    print(ROW.format(name, f"{run.seconds:.1f}", peak, read, run.blocks))
    sys.stdout.flush()


def _digest(output: Path) -> str:
    (file,) = output.glob("stages/*/model/model.safetensors")
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


if __name__ == "__main__":
    main()
