"""Recipes that run in half a second, through the real command line."""

import json
import shlex
import subprocess
from pathlib import Path

import warm
import yaml
from lmx.cli import main
from lmx.run.fs import hash_file

FRESH = {
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
VALIDATE = {"num_tokens": 500, "exact_match_samples": 4, "latency_tokens": 8}
# Measures, and asks the models nothing.
MEASURE = VALIDATE | {"exact_match_samples": 0, "num_samples": 0}
TIMES = ("seconds", "tokens_per_second", "peak_memory_gb")

# A process that dies, or is sent a signal, in the n-th call of a function.
ASSASSIN = """
import os, signal, sys
import mlx.core as mx
from lmx.cli import main as cli
from lmx.training.step import TrainStep

kind, turn = signal.Signals[sys.argv[1]], int(sys.argv[3])
places = {"step": (TrainStep, "__call__"), "save": (mx, "save_safetensors")}
owner, name = places[sys.argv[2]]
real, calls = getattr(owner, name), 0

def deadly(*arguments, **settings):
    global calls
    calls += 1
    if calls == turn:
        if name == "save_safetensors":
            open(arguments[0], "wb").write(b"half a checkpoint")
        os.kill(os.getpid(), kind)
    return real(*arguments, **settings)

setattr(owner, name, deadly)
sys.exit(cli.train(sys.argv[4:]))
"""


def write_rows(path: Path, first: int, count: int) -> str:
    """Chats with one right answer each."""
    rows = []
    for number in range(first, first + count):
        asked = {"role": "user", "content": f"Add {number} and {number % 7}."}
        text = f"{number} and {number % 7} together are {number + number % 7}"
        answer = {"role": "assistant", "content": text}
        rows.append({"messages": [asked, answer], "skill": f"addition{number % 2}"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


class Run:
    """A recipe in a folder of its own, and what became of it."""

    def __init__(self, folder: Path, *stages: dict | str, model: dict | str = ""):
        self.folder = folder
        self.output = folder / "out"
        self.recipe = folder / "tiny.yaml"
        self.data = {
            "train": [write_rows(folder / "train.jsonl", 0, 40)],
            "valid": [write_rows(folder / "valid.jsonl", 100, 10)],
            "max_seq_length": 64,
        }
        self.model = str(model) or {"from_scratch": FRESH}
        self.stages = [s if isinstance(s, dict) else {s: None} for s in stages]
        self.write()

    def write(self) -> None:
        """The recipe as it is now."""
        recipe = {"model": self.model, "data": self.data, "stages": self.stages}
        self.recipe.write_text(yaml.safe_dump(recipe, sort_keys=False))

    def arguments(self, *more: str) -> list[str]:
        return [str(self.recipe), f"output={self.output}", *more]

    def __call__(self, *more: str) -> int:
        """Run in this process; the exit code."""
        return main.train(self.arguments(*more))

    def attacked(self, kind: str, where: str, turn: int) -> subprocess.CompletedProcess:
        """Run in a process that gets a signal in the n-th step or save."""
        return warm.run(ASSASSIN, kind, where, str(turn), *self.arguments())

    def json(self, name: str):
        return json.loads((self.output / name).read_text())

    def rows(self, name: str = "metrics.jsonl") -> list[dict]:
        """Rows without what no two runs have alike."""
        lines = (self.output / name).read_text().splitlines()
        rows = map(json.loads, lines)
        return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]

    def outcome(self) -> tuple:
        """What must be the same, whatever happened on the way."""
        models = sorted((self.output / "stages").glob("*/*/model.safetensors"))
        hashes = {str(p.relative_to(self.output)): hash_file(p) for p in models}
        return hashes, self.rows()

    def half_written(self) -> list[Path]:
        return [*self.output.rglob("*.partial")]

    @property
    def log(self) -> str:
        return (self.output / "log.txt").read_text()


def resume_command(log: str) -> list[str]:
    """The arguments of the command that an interrupted run says to give."""
    [line] = [line for line in log.splitlines() if "to resume:" in line]
    program, *arguments = shlex.split(line.split("to resume:")[1])
    assert program == "lmx-train"
    return arguments
