"""The loop: resumed from anywhere it ends as if nothing had happened."""

import itertools
import json
import math
import signal
from contextlib import contextmanager

import mlx.core as mx
import pytest
from lmx.data.batching import BucketBatchSampler
from lmx.errors import Interrupted, UserError
from lmx.run.fs import sweep
from lmx.run.logger import RunLogger
from lmx.training import checkpoint
from lmx.training.step import TrainStep
from lmx.training.trainer import Trainer, TrainerIntervals
from tiny_steps import Tiny, random_examples

STEPS = 9
TIMES = ("seconds", "tokens_per_second", "peak_memory_gb")


@contextmanager
def killed_at(moment, monkeypatch):
    """Let a function, of an owner and by name, raise `Killed` when its turn comes."""
    owner, name, turn = moment
    real, calls = getattr(owner, name), itertools.count(1)

    def deadly(*arguments, **settings):
        if next(calls) == turn:
            raise Killed
        return real(*arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, deadly)
        # The body is the one statement that dies.
        with pytest.raises(Killed):
            yield


class Killed(BaseException):
    """Stands for SIGKILL: nobody catches it."""


def make_loop(folder, *, rate=lambda step: 1e-2, steps=STEPS, on_evaluate=None):
    logger = RunLogger(folder, quiet=True)
    logger.stage = "1-train"
    settings = {"max_seq_length": 16, "rows": 4}
    valid = BucketBatchSampler(random_examples(6, 16, seed=2), **settings)
    return Trainer(
        TrainStep(Tiny(dropout=0.3), max_grad_norm=1.0),
        BucketBatchSampler(random_examples(14, 16), **settings),
        steps=steps,
        rate=rate,
        valid=list(valid.in_order()),
        cadence=TrainerIntervals(2, 4, 3, folder / "checkpoints"),
        logger=logger,
        seed=5,
        on_evaluate=on_evaluate or (lambda step: logger.sample({"step": step})),
    )


def rows(folder, name="metrics.jsonl"):
    lines = (folder / name).read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines
    ]


def outcome(folder, loop, loss):
    """All that must not depend on what happened on the way."""
    weights = {k: bytes(memoryview(v)) for k, v in loop.step.parameters.items()}
    trained = loop.progress.trained_tokens
    return weights, loss, trained, rows(folder), rows(folder, "samples.jsonl")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    loop = make_loop(folder)
    return outcome(folder, loop, loop.run())


def test_reports_what_happened(expected):
    _, loss, trained, found, samples = expected
    train = [row for row in found if row["kind"] == "train"]
    valid = [row for row in found if row["kind"] == "valid"]
    assert [row["step"] for row in train] == [2, 4, 6, 8, 9]
    assert [row["step"] for row in valid] == [0, 4, 8, 9]
    assert [row["step"] for row in samples] == [0, 4, 8, 9]
    assert valid[-1]["loss"] == loss < valid[0]["loss"]
    batches = make_loop_batches()
    masks = [batches(step).mask.sum().item() for step in range(STEPS)]
    assert trained == train[-1]["trained_tokens"] == sum(masks)
    assert train[0]["trained_tokens"] == sum(masks[:2])


def make_loop_batches():
    return BucketBatchSampler(random_examples(14, 16), max_seq_length=16, rows=4)


def test_reported_loss_is_per_token(tmp_path):
    """At a rate of 0 the loss of two steps is one division of two sums."""
    loop = make_loop(tmp_path, rate=lambda step: 0.0, steps=2)
    loop.step.model.dropout.p = 0.0
    loop.step.model.dropout._p_1 = 1.0
    loop.run()
    batches = make_loop_batches()
    loss, tokens = loop.step.evaluate([batches(0), batches(1)])
    [row] = [row for row in rows(tmp_path) if row["kind"] == "train"]
    assert row["loss"] == pytest.approx(loss / tokens, rel=1e-6)


def test_a_step_of_several_batches_counts_once(tmp_path):
    logger = RunLogger(tmp_path, quiet=True)
    logger.stage = "1-train"
    valid = BucketBatchSampler(
        random_examples(6, 16, seed=2), max_seq_length=16, rows=4
    )
    seen = []

    class Watched(TrainStep):
        def __call__(self, window, *settings):
            seen.append([batch.where for batch in window])
            return super().__call__(window, *settings)

    loop = Trainer(
        Watched(Tiny()),
        make_loop_batches(),
        steps=4,
        accumulate=3,
        total=10,
        rate=lambda step: 1e-2,
        valid=list(valid.in_order()),
        cadence=TrainerIntervals(1, 4, 2, tmp_path / "checkpoints"),
        logger=logger,
        seed=5,
    )
    loop.run()
    batches = make_loop_batches()
    assert [len(window) for window in seen] == [3, 3, 3, 1]
    places = [batches(index).where for index in range(10)]
    assert list(itertools.chain(*seen)) == places
    trained = [batches(index).mask.sum().item() for index in range(10)]
    found = [row for row in rows(tmp_path) if row["kind"] == "train"]
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert [row["trained_tokens"] for row in found] == [
        sum(trained[:count]) for count in (3, 6, 9, 10)
    ]
    saved = checkpoint.numbered(tmp_path / "checkpoints")
    assert [path.name for path in saved] == ["0000002", "0000004"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_rows_of_a_whole_window_are_told(tmp_path, accumulate):
    loop = make_loop(tmp_path, rate=lambda step: math.nan)
    loop.accumulate, loop.total = accumulate, STEPS * accumulate
    with pytest.raises(UserError, match="not a number at step 2"):
        loop.run()
    batch = make_loop_batches()
    window = [batch(accumulate + index) for index in range(accumulate)]
    record = json.loads((tmp_path / "not-a-number.json").read_text())
    assert record["rows"] == [place for one in window for place in one.where]
    assert len(record["tokens"]) == sum(len(one.tokens) for one in window)


# Places where a death leaves something else on disk: whose call, and which one.
MOMENTS = {
    "before the first step": (TrainStep, "__call__", 1),
    "before the first checkpoint": (TrainStep, "__call__", 3),
    "in the middle": (TrainStep, "__call__", 6),
    "in the first validation": (RunLogger, "sample", 1),
    "in a later validation": (RunLogger, "sample", 2),
    "in the last validation": (RunLogger, "sample", 4),
    "after a row of the logger": (RunLogger, "metrics", 4),
    "while saving the first": (mx, "save_safetensors", 1),
    "while saving the second": (mx, "save_safetensors", 2),
    "while saving the last": (mx, "save_safetensors", 3),
    "with the weights saved": (checkpoint, "hash_file", 2),
    "before dropping the oldest": (checkpoint.shutil, "rmtree", 4),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_changes_nothing(tmp_path, monkeypatch, expected, moment):
    with killed_at(MOMENTS[moment], monkeypatch):
        make_loop(tmp_path).run()
    sweep(tmp_path)
    loop = make_loop(tmp_path)
    assert outcome(tmp_path, loop, loop.run()) == expected


def test_a_finished_training_runs_again_for_nothing(tmp_path, expected):
    make_loop(tmp_path).run()
    loop = make_loop(tmp_path, rate=pytest.fail)
    assert outcome(tmp_path, loop, loop.run()) == expected


def test_other_rows_are_not_trained_on_by_accident(tmp_path):
    make_loop(tmp_path).run()
    loop = make_loop(tmp_path)
    loop.batches = BucketBatchSampler(
        random_examples(14, 16, seed=9), max_seq_length=16, rows=4
    )
    with pytest.raises(UserError, match="not those this run began with"):
        loop.run()


def test_another_seed_is_another_training(tmp_path, expected):
    """Negative control: dropout is at work, and its draws reach the weights."""
    loop = make_loop(tmp_path)
    loop.seed = 6
    assert outcome(tmp_path, loop, loop.run())[0] != expected[0]


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", [1, 4, 5, STEPS - 1])
def test_a_signal_stops_after_the_step_and_saves(tmp_path, expected, kind, at):
    def rate(step):
        if step == at:
            signal.raise_signal(kind)
        return 1e-2

    before = signal.getsignal(kind)
    with pytest.raises(Interrupted, match=f"stopped after step {at + 1}; saved"):
        make_loop(tmp_path, rate=rate).run()
    assert signal.getsignal(kind) is before
    assert checkpoint.numbered(tmp_path / "checkpoints")[-1].name.endswith(str(at + 1))
    loop = make_loop(tmp_path)
    assert outcome(tmp_path, loop, loop.run()) == expected


def test_a_damaged_checkpoint_costs_its_steps_only(tmp_path, expected, capsys):
    make_loop(tmp_path).run()
    *_, newest = checkpoint.numbered(tmp_path / "checkpoints")
    (newest / "state.safetensors").write_bytes(b"gone")
    loop = make_loop(tmp_path)
    assert outcome(tmp_path, loop, loop.run()) == expected
    assert f"{newest} is damaged" in capsys.readouterr().err
    assert "resuming after step 6" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize("rate", [1e38, math.nan])
def test_what_is_not_a_number_stops_the_run(tmp_path, rate):
    loop = make_loop(tmp_path, rate=lambda step: rate if step >= 4 else 1e-2)
    with pytest.raises(UserError, match="not a number at step") as caught:
        loop.run()
    batch = make_loop_batches()
    record = json.loads((tmp_path / "not-a-number.json").read_text())
    step = record["step"]
    assert f"at step {step}" in caught.value.message
    assert caught.value.code == 1
    assert caught.value.place.split(", ") == list(batch(step - 1).where)
    assert record["tokens"] == batch(step - 1).tokens.tolist()
    assert "not-a-number.json" in caught.value.hint
    # The checkpoint from before is good: with a sound rate the run goes through.
    assert checkpoint.numbered(tmp_path / "checkpoints")[0].name == "0000003"
    assert math.isfinite(make_loop(tmp_path).run())
