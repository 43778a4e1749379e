"""Budgets of train and draft stages, in time or in tokens, in place of steps."""

import re
import signal
import weakref
from itertools import count
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
import warm
from lmx.config.budget import budget_seconds
from lmx.config.draft import DraftConfig
from lmx.config.train import TrainConfig
from lmx.files.artifacts import ArtifactStore
from lmx.pipeline import budget
from lmx.pipeline.budget import seconds_per_step, steps_within
from lmx.pipeline.train.run import TrainRun
from test_draft_stage import DRAFT, make_run
from tiny_runs import SIGNAL_AT_CALL, TRAIN, Run


class SlowStep:
    """A step of a known time, which changes the weights of its model."""

    now = 0.0

    def __init__(self, model):
        self.model, self.parameters = model, {}
        self.optimizer = SimpleNamespace(state={})

    def __call__(self, batch, learning_rate, seed):
        SlowStep.now += batch
        self.model.weight = self.model.weight + 1
        return mx.zeros(())


class Times:
    """Batches that take so many seconds each."""

    def __init__(self, seconds):
        self.seconds, self.digest = seconds, str(seconds)

    def __call__(self, step):
        return self.seconds


def test_steps_fit_into_the_time_and_stay_the_same(tmp_path, monkeypatch):
    clock = SimpleNamespace(perf_counter=lambda: SlowStep.now)
    monkeypatch.setattr(budget, "time", clock)
    model = nn.Linear(2, 2)
    before = model.weight.tolist()

    def steps_of(*seconds, minutes=1.0):
        parts = [Times(each) for each in seconds]
        store = ArtifactStore(tmp_path, print)
        return steps_within(
            60 * minutes,
            lambda: seconds_per_step(SlowStep(model), parts),
            store,
            [part.digest for part in parts],
        )

    # Text of .25 s and completions of .75 s, half of the steps each.
    first = steps_of(0.25, 0.75)
    assert first == 120
    assert model.weight.tolist() == before
    # A resumed run measures nothing, another budget does.
    assert steps_of(0.25, 0.75) == first
    assert steps_of(0.25, 0.75, minutes=2) == 240
    assert steps_of(0.25, minutes=1e-6) == 1


@pytest.mark.parametrize(
    ("keys", "steps", "seconds"),
    [
        ({}, 1000, None),
        ({"steps": 7}, 7, None),
        ({"budget": 5000, "batch_tokens": 1000}, 5, None),
        ({"budget": 5, "batch_tokens": 1000}, 1, None),
        ({"budget": "45min"}, None, 2700),
        ({"budget": "3h"}, None, 10800),
        ({"budget": ".5h"}, None, 1800),
    ],
)
def test_steps_and_seconds_of_a_recipe(keys, steps, seconds):
    config = DraftConfig(**keys)
    assert config.num_steps == steps
    assert budget_seconds(config.budget) == seconds


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ({"steps": 7}, 7),
        ({"epochs": 2}, 20),
        ({"budget": 5000}, 50),
        ({"budget": 5}, 1),
        ({"budget": "3h"}, None),
    ],
)
def test_steps_of_a_train_stage(keys, steps):
    config = TrainConfig(**keys, batch_size=4)
    assert config.num_steps(per_epoch=10, tokens=100.0) == steps


@pytest.mark.parametrize(
    "keys",
    [
        *(
            {"budget": budget}
            for budget in ("3 hours", "5", "h", "1e3min", "0h", 0, -1)
        ),
        {"budget": "3h", "steps": 10},
    ],
)
def test_budgets_that_are_refused(keys):
    with pytest.raises(ValueError, match="budget"):
        DraftConfig(**keys)
    with pytest.raises(ValueError, match="budget"):
        TrainConfig(**keys, batch_size=4)


@pytest.mark.parametrize(
    "keys",
    [
        {"qat": {"bits": 4, "fake_quant_after_n_steps": 2}},
        {"rollouts": {}, "teacher": {}},
    ],
)
def test_what_needs_steps_or_epochs(keys):
    with pytest.raises(ValueError, match="needs steps or epochs"):
        TrainConfig(**keys, batch_size=4, budget="3h")


def test_a_run_with_a_budget_of_time_trains_as_many_steps(base, tmp_path):
    stage = {key: value for key, value in DRAFT.items() if key != "steps"}
    stage |= {"budget": "0.008min"}
    folders = tmp_path / "time", tmp_path / "steps"
    for folder in folders:
        folder.mkdir()
    run = make_run(folders[0], {"draft": stage}, model=base)
    assert run() == 0
    steps = max(r["step"] for r in run.records() if r["kind"] == "valid")
    assert f" {steps:,} steps fit into 0.008min" in run.log
    # The timed steps leave no trace: as many steps of a recipe end with equal weights.
    del stage["budget"]
    stage["steps"] = steps
    other = make_run(folders[1], {"draft": stage}, model=base)
    assert other() == 0
    weights = [r.output / "draft/model.safetensors" for r in (run, other)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_the_dry_run_estimates_the_steps(base, tmp_path, capsys):
    stage = {"budget": "2h", "draft_model": {"num_layers": 1}}
    run = make_run(tmp_path, {"draft": stage}, model=base)
    assert run("--dry-run") == 0
    assert re.search(r"1-draft: roughly .* for [\d,]+ steps", capsys.readouterr().out)
    # The size of a model that is not here is not known.
    stage["draft_model"]["init_from"] = "some/sibling"
    make_run(tmp_path, {"draft": stage}, model=base)
    assert run("--dry-run") == 0
    assert "1-draft: roughly" not in capsys.readouterr().out


GRID = {"bits": 2, "group_size": 32}
LSQ = {"qat": GRID | {"quantizer": "lsq"}, "gradient_accumulation_steps": 2}
TRAININGS = {
    "full from codes": LSQ | {"teacher": {"offline": True, "top_k": 4}},
    "lora": LSQ | {"adapter": {"rank": 4}, "compare_full_precision": True},
}


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_with_a_budget_of_time_trains_as_many_steps(name, base, tmp_path):
    stage = {key: value for key, value in TRAIN.items() if key != "steps"}
    stage |= TRAININGS[name] | {"budget": "0.004min"}
    stages = [{"quantize": GRID | {"method": "rtn"}}] if "codes" in name else []
    folders = tmp_path / "time", tmp_path / "steps"
    for folder in folders:
        folder.mkdir()
    run = Run(folders[0], *stages, {"train": stage}, model=base)
    assert run() == 0
    (steps,) = map(int, re.findall(r" (\d+) steps fit into 0.004min", run.log))
    del stage["budget"]
    other = Run(folders[1], *stages, {"train": stage | {"steps": steps}}, model=base)
    assert other() == 0
    for folder in ("model", *["fp_baseline/dense"] * (name == "lora")):
        files = (
            next(r.output.glob(f"stages/*-train/{folder}/model.safetensors"))
            for r in (run, other)
        )
        first, second = (file.read_bytes() for file in files)
        assert first == second


def test_one_training_is_in_memory_at_a_time(base, tmp_path, monkeypatch):
    """The timed training, that of the budget and the baseline, one after the other."""
    made, alive, init = [], [], TrainRun.__init__

    def counted(self, *arguments):
        alive.append(sum(other() is not None for other in made))
        made.append(weakref.ref(self))
        init(self, *arguments)

    monkeypatch.setattr(TrainRun, "__init__", counted)
    stage = {key: value for key, value in TRAIN.items() if key != "steps"}
    stage |= TRAININGS["lora"] | {"budget": "0.001min"}
    assert Run(tmp_path, {"train": stage}, model=base)() == 0
    assert alive == [0, 0, 0]


@pytest.mark.parametrize("accumulation", [1, 16])
def test_a_budget_of_tokens(accumulation, base, tmp_path, capsys):
    """Also where all examples together make fewer batches than a step may have."""
    stage = {key: value for key, value in TRAIN.items() if key != "steps"}
    stage["gradient_accumulation_steps"] = accumulation
    run = Run(tmp_path, {"train": stage | {"budget": 700}}, model=base)
    assert run("--dry-run") == 0
    (planned,) = map(int, re.findall(r"for (\d+) steps", capsys.readouterr().out))
    assert run() == 0
    progress = [r for r in run.records() if r["kind"] == "train"][-1]
    assert progress["step"] == planned


# A program whose timed steps take a fifth of a second each.
WITH_CLOCK = f"""
from itertools import count
from types import SimpleNamespace
from lmx.pipeline import budget
budget.time = SimpleNamespace(perf_counter=count().__next__)
{SIGNAL_AT_CALL}"""


@pytest.mark.parametrize(("call", "steps"), [(4, 7), (10, 14)])
def test_a_killed_run_has_as_many_steps_and_equal_weights(
    call, steps, base, tmp_path, monkeypatch
):
    """Killed in a timed step, and in the third one of the training."""
    stage = {key: value for key, value in TRAIN.items() if key != "steps"}
    stage |= {"qat": GRID | {"quantizer": "lsq"}, "teacher": {}, "packing": True}
    stage |= {"budget": "0.0475min", "batch_size": 2}
    folders = tmp_path / "time", tmp_path / "steps"
    for folder in folders:
        folder.mkdir()
    run = Run(folders[0], {"quantize": GRID}, {"train": stage}, model=base)
    killed = warm.run(WITH_CLOCK, "SIGKILL", "step", str(call), *run.arguments())
    assert killed.returncode == -signal.SIGKILL
    # The machine is half as fast when the run is resumed.
    clock = SimpleNamespace(perf_counter=count(0, 2).__next__)
    monkeypatch.setattr(budget, "time", clock)
    assert run() == 0
    assert ("resuming after step 2" in run.log) == (call == 10)
    assert {*re.findall(r" (\d+) steps fit into", run.log)} == {str(steps)}
    del stage["budget"]
    stage["steps"] = steps
    other = Run(folders[1], {"quantize": GRID}, {"train": stage}, model=base)
    assert other() == 0
    assert run.outcome() == other.outcome()
