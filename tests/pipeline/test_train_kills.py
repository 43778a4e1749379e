"""A run that is killed repeatedly at random ends with the undisturbed weights."""

import os
import random
import time

import pytest
from tiny_runs import TRAIN, Run
from warm import Process

PROGRAM = "import sys; from lmx.cli.main import train; sys.exit(train(sys.argv[1:]))"
KILLS, HITS = 5, 2
LORA = {"type": "lora", "rank": 4, "dropout": 0.2}
KINDS = {
    "lora": {
        "steps": 30,
        "gradient_accumulation_steps": 2,
        "adapter": LORA,
        "load_best_at_end": True,
    },
    # The learning rate is too high: the run stops early and keeps an older checkpoint.
    "lean": {
        "steps": None,
        "epochs": 47.8,
        "gradient_accumulation_steps": 3,
        "adapter": LORA | {"type": "dora"},
        "optimizer": "muon",
        "learning_rate": 0.03,
        "lr_schedule": "constant",
        "load_best_at_end": True,
        "save_total_limit": 1,
        "early_stopping_patience": 1,
        "gradient_checkpointing": True,
        "loss_chunk_tokens": 16,
    },
}


def make_run(folder, kind, base):
    folder.mkdir()
    return Run(folder, {"train": TRAIN | KINDS[kind]}, model=base)


def partial_writes(run):
    """The partial files and folders at this moment."""
    stage = run.output / "stages/1-train"
    folders = [run.output, stage, stage / "checkpoints"]
    names = (name for p in folders if p.is_dir() for name in os.listdir(p))
    return {name for name in names if name.endswith(".partial")}


def count_records(run):
    path = run.output / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_once(run, in_a_write, rng):
    """Run and kill: at the n-th partial file or folder since the start, or up to 30 ms
    after a number of new metrics records. Return whether the kill ended it, and whether
    it hit a write."""
    process = Process(PROGRAM, *run.arguments())
    if in_a_write:
        seen = partial_writes(run)
        count = len(seen) + rng.randint(1, 4)
        while process.poll() is None and len(seen) < count:
            seen |= partial_writes(run)
    else:
        count, last, added = rng.randint(1, 9), count_records(run), 0
        while process.poll() is None and added < count:
            now = count_records(run)
            added, last = added + (now > last), now
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.03))
    process.kill()
    return process.wait() < 0, bool(partial_writes(run))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_training_resumes_after_kills_at_random_moments(tmp_path, base, kind):
    undisturbed = make_run(tmp_path / "undisturbed", kind, base)
    assert undisturbed() == 0
    run, rng = make_run(tmp_path / "killed", kind, base), random.Random(kind)
    kills = hits = 0
    while kills < KILLS or hits < HITS:
        killed, hit = kill_once(run, kills % 2 == 0, rng)
        assert killed, f"it ended after {kills} kills, {hits} of them in a write"
        kills, hits = kills + 1, hits + hit
    assert run() == 0
    assert run.outcome() == undisturbed.outcome()
    step_lines = [
        [x[20:] for x in r.log.splitlines() if " step " in x]
        for r in (undisturbed, run)
    ]
    assert step_lines[0][-2:] == step_lines[1][-2:]
    facts = run.json("manifest.json")["stages"]["1-train"]["result"]["facts"]
    prefix = "keeping step {selected_step} of {steps}: validation loss"
    assert step_lines[0][-1].startswith(prefix.format(**facts))
    assert facts["selected_step"] == facts["best_step"] < facts["steps"]
