"""Quantize a model that is larger than the memory it takes, and kill it in the middle.

A Llama of 1.5 billion random weights is written to disk, quantized by gptq through a
recipe, killed with SIGKILL when half of the blocks are done, and run again. Every run
is a process of its own, whose largest resident size is printed.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from lmx.models import checkpoint_writer

LMX = "import sys; from lmx.cli.main import train; sys.exit(train(sys.argv[1:]))"
ROW = "{:12}{:>9}{:>10}{:>11}{:>9}"
BLOCKS = "stages/*/scratch/walk/[0-9]*/tensors.safetensors"


def main() -> None:
    arguments = _arguments()
    if arguments.make:
        make(Path(arguments.make), arguments)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        folder = Path(scratch)
        command = [sys.executable, __file__, *sys.argv[1:], "--make", str(folder)]
        subprocess.run(command, check=True)
        _measure(folder, arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key-value-heads", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--calibration", type=int, default=8192, help="tokens")
    parser.add_argument("--rounds", type=int, default=3, help="of refit and descent")
    parser.add_argument("--threads", type=int, help="of the BLAS; absent = all cores")
    parser.add_argument("--folder", help="where to work; absent = temporary files")
    parser.add_argument(
        "--whole", action="store_true", help="compare with a run that is not killed"
    )
    parser.add_argument("--make", help=argparse.SUPPRESS)
    return parser.parse_args()


def make(folder: Path, arguments: argparse.Namespace) -> None:
    """Write model and recipe; weights are made when they are written, one by one."""
    import mlx.core as mx
    from lmx.config.model import ScratchModelConfig
    from lmx.models import from_scratch
    from lmx.models.loader import build_model
    from mlx.utils import tree_flatten

    shape = ScratchModelConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.intermediate,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.key_value_heads,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    config = from_scratch.llama_config(shape)
    weights, key = {}, mx.random.key(0)
    for name, value in tree_flatten(build_model(config).parameters()):
        if value.ndim > 1:
            key, draw = mx.random.split(key)
            # Uniform ones cost less than normal ones.
            value = mx.random.uniform(-0.05, 0.05, value.shape, mx.bfloat16, key=draw)
        weights[name] = value.astype(mx.bfloat16)
    (folder / "tokenizer").mkdir()
    (folder / "model").mkdir()
    from_scratch.train_tokenizer(
        [Path(__file__).read_text()], 320, folder / "tokenizer"
    )
    checkpoint_writer.write_checkpoint(
        folder / "model", weights, config, companions=folder / "tokenizer"
    )
    calibration = {"dataset": "builtin:stdlib", "num_tokens": arguments.calibration}
    stage = {"method": "gptq", "bits": arguments.bits, "calibration": calibration}
    # Both run the whole model, which has no room here.
    stage |= {
        "scale_tuning": False,
        "rollback_if_worse": False,
        "refine_iters": arguments.rounds,
    }
    recipe = {"model": str(folder / "model"), "stages": [{"quantize": stage}]}
    # JSON is YAML.
    (folder / "recipe.yaml").write_text(json.dumps(recipe))


@dataclass
class Run:
    """A process that quantizes.

    Attributes:
        seconds: from its start to its end.
        peak: bytes, the largest resident size.
        read: bytes that it read, from the disk or its cache; None where nobody counts.
        blocks: how many it left quantized.
    """

    seconds: float
    peak: int
    read: int | None
    blocks: int


def run(
    folder: Path, output: str, arguments: argparse.Namespace, kill_at: int | None = None
) -> Run:
    """Quantize; kill the process once that many blocks are done."""
    recipe = [str(folder / "recipe.yaml"), f"output={folder / output}"]
    started = time.perf_counter()
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    if arguments.threads:
        environment["LMX_BLAS_THREADS"] = str(arguments.threads)
    process = subprocess.Popen(
        [sys.executable, "-c", LMX, *recipe, "--quiet"], env=environment
    )
    read, blocks = None, 0
    while True:
        read = _bytes_read(process.pid) or read
        number, status, usage = os.wait4(process.pid, os.WNOHANG)
        if number:
            break
        blocks = max(blocks, len(list((folder / output).glob(BLOCKS))))
        if kill_at is not None and blocks >= kill_at:
            process.send_signal(signal.SIGKILL)
        time.sleep(0.05)
    killed = os.WIFSIGNALED(status)
    assert killed == (kill_at is not None), f"it ended with {status}"
    assert killed or os.WEXITSTATUS(status) == 0
    process.returncode = os.waitstatus_to_exitcode(status)
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Run(time.perf_counter() - started, peak, read, blocks)


def _bytes_read(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(x.split()[1]) for x in lines if x.startswith("rchar")), None)


def _measure(folder: Path, arguments: argparse.Namespace) -> None:
    size = sum(f.stat().st_size for f in (folder / "model").glob("*.safetensors"))
    print(f"{size / 1e9:.2f} GB of weights in {arguments.layers} blocks, bfloat16")
    print(ROW.format("run", "seconds", "peak GB", "read GB", "blocks"))
    half = max(1, arguments.layers // 2)
    _show("killed", run(folder, "run", arguments, kill_at=half))
    _show("gone on with", run(folder, "run", arguments))
    digest = _digest(folder / "run")
    print(f"sha256 of the weights {digest}")
    if arguments.whole:
        _show("whole", run(folder, "whole", arguments))
        is_same = _digest(folder / "whole") == digest
        print("the run that was killed left", "the same" if is_same else "OTHER BYTES")
        if not is_same:
            sys.exit(1)


def _show(name: str, found: Run) -> None:
    read = "-" if found.read is None else f"{found.read / 1e9:.2f}"
    peak = f"{found.peak / 1e9:.2f}"
    print(ROW.format(name, f"{found.seconds:.1f}", peak, read, found.blocks))
    sys.stdout.flush()


def _digest(output: Path) -> str:
    (file,) = output.glob("stages/*/model/model.safetensors")
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


if __name__ == "__main__":
    main()
