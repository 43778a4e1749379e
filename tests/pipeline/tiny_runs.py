"""Recipes that run in half a second through the real command line."""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import mlx.core as mx
import warm
import yaml
from lmx.cli import main
from lmx.files.hashes import hash_file

SCRATCH_CONFIG = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TRAIN = {
    "steps": 12,
    "batch_size": 8,
    "learning_rate": 3e-3,
    "logging_steps": 1,
    "eval_steps": 5,
    "save_steps": 2,
}
EVALUATE = {"num_tokens": 500, "exact_match": {"samples": 4}, "latency_tokens": 8}
# Evaluation without generation.
METRICS_ONLY = {"num_tokens": 500, "exact_match": {"samples": 0}, "num_samples": 0}
TIMING_KEYS = ("seconds", "trained_tokens_per_second", "peak_memory_gb")

# A program that signals its own process in the n-th call of a function.
SIGNAL_AT_CALL = """
import os, signal, sys
import mlx.core as mx
from lmx.cli import main as cli
from lmx.training.rewards import Reward
from lmx.training.step import TrainStep

signal_number, turn = signal.Signals[sys.argv[1]], int(sys.argv[3])
places = {
    "step": (TrainStep, "__call__"),
    "save": (mx, "save_safetensors"),
    "reward": (Reward, "__call__"),
}
owner, name = places[sys.argv[2]]
real, calls = getattr(owner, name), 0

def signal_at_turn(*arguments, **settings):
    global calls
    calls += 1
    if calls == turn:
        if name == "save_safetensors":
            open(arguments[0], "wb").write(b"half a checkpoint")
        os.kill(os.getpid(), signal_number)
    return real(*arguments, **settings)

setattr(owner, name, signal_at_turn)
sys.exit(cli.train(sys.argv[4:]))
"""

# The same, where only the rank of the first argument gets it.
SIGNAL_ONE_RANK = (
    """
import os, sys
arguments = sys.argv[1:]
if os.environ["MLX_RANK"] != arguments.pop(0):
    arguments[1:3] = ["step", "1000000"]
sys.argv[1:] = arguments
"""
    + SIGNAL_AT_CALL
)


def write_examples(path: Path, start: int, count: int) -> str:
    """Write chats that have exactly one correct answer each."""
    examples = []
    for n in range(start, start + count):
        prompt = {"role": "user", "content": f"Add {n} and {n % 7}."}
        text = f"{n} and {n % 7} together are {n + n % 7}"
        completion = {"role": "assistant", "content": text}
        examples.append({"messages": [prompt, completion], "skill": f"addition{n % 2}"})
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))
    return str(path)


class Run:
    """A recipe in its own folder, and the outputs of its run."""

    def __init__(self, folder: Path, *stages: dict | str, model: dict | str = ""):
        self.folder = folder
        self.output = folder / "out"
        self.recipe = folder / "tiny.yaml"
        self.data = {
            "train": [write_examples(folder / "train.jsonl", 0, 40)],
            "valid": [write_examples(folder / "valid.jsonl", 100, 10)],
            "max_seq_length": 64,
        }
        self.model = str(model) or {"from_scratch": SCRATCH_CONFIG}
        self.stages = [s if isinstance(s, dict) else {s: None} for s in stages]
        self.write()

    def write(self) -> None:
        """Write the recipe file from the current attributes."""
        recipe = {"model": self.model, "data": self.data, "stages": self.stages}
        self.recipe.write_text(yaml.safe_dump(recipe, sort_keys=False))

    def copy(self, folder: Path) -> "Run":
        """This run and its outputs, in another folder, that a test can damage."""
        folder.mkdir(exist_ok=True)
        run = Run(folder, *self.stages)
        run.model, run.data = self.model, self.data
        run.write()
        shutil.copytree(self.output, run.output)
        return run

    def arguments(self, *overrides: str) -> list[str]:
        return [str(self.recipe), f"output={self.output}", *overrides]

    def __call__(self, *overrides: str) -> int:
        """Run in this process and return the exit code."""
        return main.train(self.arguments(*overrides))

    def run_with_signal(
        self, signal_name: str, place: str, call: int
    ) -> subprocess.CompletedProcess:
        """Run in a subprocess that gets a signal in the n-th step, save or
        reward."""
        return warm.run(
            SIGNAL_AT_CALL, signal_name, place, str(call), *self.arguments()
        )

    def json(self, name: str):
        return json.loads((self.output / name).read_text())

    def records(self, name: str = "metrics.jsonl") -> list[dict]:
        """The records of a JSON Lines file, without timings and memory."""
        lines = (self.output / name).read_text().splitlines()
        records = map(json.loads, lines)
        return [
            {k: v for k, v in record.items() if k not in TIMING_KEYS}
            for record in records
        ]

    def outcome(self) -> tuple:
        """Model hashes and metrics: equal for interrupted and undisturbed runs."""
        models = sorted((self.output / "stages").glob("*/*/model.safetensors"))
        hashes = {str(p.relative_to(self.output)): hash_file(p) for p in models}
        # Only training and evaluation have metrics.
        has_metrics = (self.output / "metrics.jsonl").exists()
        return hashes, self.records() if has_metrics else []

    def partial_files(self) -> list[Path]:
        return [*self.output.rglob("*.partial")]

    @property
    def log(self) -> str:
        return (self.output / "log.txt").read_text()


def negate(folder):
    """Negate one matrix of a model in place: names, shapes and the last bytes stay."""
    file = folder / "model.safetensors"
    before = mx.load(str(file))
    mx.eval(before)
    status, data = file.stat(), bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    name = next(name for name in header if "v_proj" in name)
    first, end = (start + offset for offset in header[name]["data_offsets"])
    size = before[name].dtype.size
    for place in range(first + size - 1, end, size):
        data[place] ^= 0x80
    file.write_bytes(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = mx.load(str(file))
    assert mx.array_equal(after.pop(name), -before.pop(name))
    assert all(mx.array_equal(after[other], before[other]) for other in before)


def resume_command(log: str) -> list[str]:
    """The arguments of the resume command that an interrupted run prints."""
    [line] = [line for line in log.splitlines() if "to resume:" in line]
    program, *arguments = shlex.split(line.split("to resume:")[1])
    assert program == "lmx-train"
    return arguments
