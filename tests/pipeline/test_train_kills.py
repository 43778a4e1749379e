"""Killed from outside at any moment, again and again: the weights are those of a run
that was left alone."""

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
    # Too fast to go well for long: it ends early, and the best is an older one.
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


def writes(run):
    """What is half-written at this moment."""
    stage = run.output / "stages/1-train"
    places = [run.output, stage, stage / "checkpoints"]
    names = (name for p in places if p.is_dir() for name in os.listdir(p))
    return {name for name in names if name.endswith(".partial")}


def rows(run):
    path = run.output / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_write(process, run, draw):
    """Until the n-th file or folder since the start is being written."""
    seen, turn = writes(run), draw.randint(1, 4)
    before = len(seen)
    while process.poll() is None and len(seen) < before + turn:
        seen |= writes(run)


def wait_for_rows(process, run, draw):
    """Until a few rows have been added to the report, and a moment longer."""
    turn, last, added = draw.randint(1, 9), rows(run), 0
    while process.poll() is None and added < turn:
        now = rows(run)
        added, last = added + (now > last), now
        time.sleep(0.001)
    time.sleep(draw.uniform(0, 0.03))


def kill_once(run, wait, draw):
    """Run and kill; whether it was alive until then, and in the middle of a write."""
    process = Process(PROGRAM, *run.arguments())
    wait(process, run, draw)
    process.kill()
    return process.wait() < 0, bool(writes(run))


@pytest.mark.parametrize("kind", KINDS)
def test_training_resumes_after_kills_at_random_moments(tmp_path, base, kind):
    calm = make_run(tmp_path / "calm", kind, base)
    assert calm() == 0
    run, draw = make_run(tmp_path / "killed", kind, base), random.Random(kind)
    kills = hits = 0
    while kills < KILLS or hits < HITS:
        wait = wait_for_rows if kills % 2 else wait_for_write
        killed, hit = kill_once(run, wait, draw)
        assert killed, f"it ended after {kills} kills, {hits} of them in a write"
        kills, hits = kills + 1, hits + hit
    assert run() == 0
    assert run.outcome() == calm.outcome()
    told = [[x[20:] for x in r.log.splitlines() if " step " in x] for r in (calm, run)]
    assert told[0][-2:] == told[1][-2:]
    facts = run.json("manifest.json")["stages"]["1-train"]["facts"]["facts"]
    begin = "keeping step {selected_step} of {steps}: validation loss"
    assert told[0][-1].startswith(begin.format(**facts))
    assert facts["selected_step"] == facts["best_step"] < facts["steps"]
