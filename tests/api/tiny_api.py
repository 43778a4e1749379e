"""A tiny recipe as a dict, with its data, and a callback that records a run."""

import json
from pathlib import Path

import lmx

MODEL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TRAIN = {
    "steps": 6,
    "batch_size": 4,
    "learning_rate": 3e-3,
    "logging_steps": 1,
    "eval_steps": 3,
    "save_steps": 2,
}
EVALUATE = {
    "num_tokens": 200,
    "exact_match": {"samples": 0},
    "num_samples": 1,
    "latency_tokens": 8,
}


def write_examples(folder: Path) -> Path:
    """Write train.jsonl and valid.jsonl; returns the folder."""
    for name, start, count in (("train", 0, 24), ("valid", 100, 8)):
        examples = [
            {"prompt": f"Add {n} and 1.", "completion": f"It is {n + 1}"}
            for n in range(start, start + count)
        ]
        lines = "".join(json.dumps(example) + "\n" for example in examples)
        (folder / f"{name}.jsonl").write_text(lines)
    return folder


def tiny_recipe(files: Path) -> dict:
    """A recipe of every kind of stage but draft."""
    return {
        "model": {"from_scratch": dict(MODEL)},
        "data": {
            "train": files / "train.jsonl",
            "valid": files / "valid.jsonl",
            "max_seq_length": 64,
        },
        "stages": [
            {"train": dict(TRAIN)},
            {"quantize": {"bits": 4, "group_size": 32}},
            {"evaluate": dict(EVALUATE)},
            {"export": {}},
        ],
    }


class Recorder(lmx.Callback):
    """Records the events of a run, and stops it at one of them."""

    def __init__(self, stop: tuple[str, int] | None = None):
        self.events, self.stop = [], stop

    def note(self, event, state):
        self.events.append((event, state.step))
        return False if (event, state.step) == self.stop else None

    def on_step(self, state):
        assert state.loss > 0 < state.gradient_norm
        return self.note("step", state)

    def on_evaluate(self, state):
        assert state.validation_loss > 0
        return self.note("evaluate", state)

    def on_stage_end(self, state):
        self.events.append((state.stage, [*state.metrics]))
