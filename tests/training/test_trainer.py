"""The trainer: a resumed training ends with the same weights and the same logs."""

import itertools
import json
import math
import signal
import time
from contextlib import contextmanager

import mlx.core as mx
import pytest
from lmx.cpu import memory
from lmx.data.batching import BucketBatchSampler
from lmx.errors import Interrupted, UserError
from lmx.files import artifacts
from lmx.files.atomic import remove_partial_files
from lmx.interfaces import Communicator
from lmx.run.callbacks import Callback, CallbackList
from lmx.run.logger import RunLogger
from lmx.run.progress import ProgressBar
from lmx.run.signals import stop_requested
from lmx.training import checkpoint
from lmx.training.step import TrainStep
from lmx.training.trainer import Trainer, TrainerConfig
from tiny_steps import Tiny, make_step, random_examples

STEPS = 9
TIMES = ("seconds", "trained_tokens_per_second", "peak_memory_gb")


@contextmanager
def killed_at(moment, monkeypatch):
    """Raise `Killed` in call number `turn` of an attribute of an owner."""
    owner, name, turn = moment
    real, calls = getattr(owner, name), itertools.count(1)

    def killing(*arguments, **settings):
        if next(calls) == turn:
            raise Killed
        return real(*arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killing)
        # The body of the with statement raises.
        with pytest.raises(Killed):
            yield


class Killed(BaseException):
    """A stand-in for SIGKILL that no handler catches."""


def make_trainer(
    folder, *, learning_rate=lambda step: 1e-2, on_evaluate=None, seed=5, **changes
):
    folder.mkdir(exist_ok=True)
    logger = RunLogger(folder, quiet=True)
    logger.stage = "1-train"
    config = {"logging_steps": 2, "eval_steps": 4, "save_steps": 3, "steps": STEPS}
    return Trainer(
        make_step(Tiny(dropout=0.3), max_grad_norm=1.0),
        make_batches(),
        TrainerConfig(
            seed=seed, checkpoint_dir=folder / "checkpoints", **config | changes
        ),
        learning_rate=learning_rate,
        eval_batches=make_eval_batches(),
        logger=logger,
        on_evaluate=on_evaluate or (lambda step: logger.sample({"step": step})),
    )


def make_batches(seed=0):
    return BucketBatchSampler(
        random_examples(14, 16, seed=seed), max_seq_length=16, batch_size=4
    )


def make_eval_batches():
    examples = random_examples(6, 16, seed=2)
    return list(
        BucketBatchSampler(examples, max_seq_length=16, batch_size=4).in_order()
    )


def records(folder, name="metrics.jsonl"):
    lines = (folder / name).read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines
    ]


def outcome(folder, trainer, loss):
    """Everything that an interruption must not change."""
    weights = {k: bytes(memoryview(v)) for k, v in trainer.step.parameters.items()}
    trained = trainer.progress.trained_tokens
    return weights, loss, trained, records(folder), records(folder, "samples.jsonl")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    trainer = make_trainer(folder)
    return outcome(folder, trainer, trainer.train())


@pytest.mark.parametrize(("learning_rate", "warnings"), [(1e-2, 0), (10.0, 1)])
def test_rate_that_ruins_the_model_gets_a_warning(tmp_path, learning_rate, warnings):
    """Here the last validation loss is several times the one before the first step."""
    trainer = make_trainer(
        tmp_path / "run", learning_rate=lambda step: learning_rate, eval_steps=STEPS
    )
    trainer.train()
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("times that of step 0: learning_rate is too high") == warnings


def test_trainer_logs_training_and_evaluation(expected):
    _, loss, trained, result, samples = expected
    train = [record for record in result if record["kind"] == "train"]
    valid = [record for record in result if record["kind"] == "valid"]
    assert [record["step"] for record in train] == [2, 4, 6, 8, 9]
    assert [record["step"] for record in valid] == [0, 4, 8, 9]
    assert [record["step"] for record in samples] == [0, 4, 8, 9]
    assert valid[-1]["loss"] == loss < valid[0]["loss"]
    batches = make_batches()
    masks = [batches(step).mask.sum().item() for step in range(STEPS)]
    assert trained == train[-1]["trained_tokens"] == sum(masks)
    assert train[0]["trained_tokens"] == sum(masks[:2])


def test_trainer_logs_loss_per_token(tmp_path):
    """With a learning rate of 0 the loss of two steps is a ratio of sums."""
    trainer = make_trainer(tmp_path, learning_rate=lambda step: 0.0, steps=2)
    trainer.step.model.dropout.p = 0.0
    trainer.step.model.dropout._p_1 = 1.0
    trainer.train()
    batches = make_batches()
    loss, tokens, _ = trainer.step.evaluate([batches(0), batches(1)])
    [record] = [record for record in records(tmp_path) if record["kind"] == "train"]
    assert record["loss"] == pytest.approx(loss / tokens, rel=1e-6)
    loss, tokens, _ = trainer.step.evaluate(make_eval_batches())
    for record in records(tmp_path):
        if record["kind"] == "valid":
            assert record["loss"] == pytest.approx(loss / tokens, rel=1e-6)


@pytest.fixture
def progress_lines(monkeypatch):
    """The progress after every change, without the time left."""
    lines = []
    for method in ("skip", "advance", "track"):
        real = getattr(ProgressBar, method)

        def recorded(bar, *arguments, real=real):
            result = real(bar, *arguments)
            lines.append(bar.line().split("  ")[0])
            return result

        monkeypatch.setattr(ProgressBar, method, recorded)
    return lines


def test_progress_moves_at_every_step_and_starts_at_the_resumed_one(
    tmp_path, progress_lines
):
    def training():
        return [x for x in dict.fromkeys(progress_lines) if x.startswith("training")]

    rates = itertools.count()

    def stops_in_step_7(step):
        if next(rates) == 6:
            raise Killed
        return 1e-2

    with pytest.raises(Killed):
        make_trainer(tmp_path, learning_rate=stops_in_step_7, logging_steps=9).train()
    assert training() == [f"training {n}/9" for n in range(7)]
    progress_lines.clear()
    make_trainer(tmp_path, logging_steps=9).train()
    assert training() == [f"training {n}/9" for n in range(6, 10)]
    # Validation has a progress of its own: it may take longer than a step.
    count = len(make_eval_batches())
    lines = [f"validation at step 8 {n}/{count}" for n in range(count + 1)]
    assert {*lines} <= {*progress_lines}


def test_gradient_accumulation_counts_one_step(tmp_path):
    windows = []

    class Watched(TrainStep):
        def __call__(self, window, *settings):
            windows.append([batch.where for batch in window])
            return super().__call__(window, *settings)

    trainer = make_trainer(tmp_path, steps=4, logging_steps=1, save_steps=2)
    trainer.indices = lambda step: range(3 * step, min(3 * step + 3, 10))
    trainer.step = make_step(Tiny(), Watched)
    trainer.train()
    batches = make_batches()
    assert [len(window) for window in windows] == [3, 3, 3, 1]
    places = [batches(index).where for index in range(10)]
    assert list(itertools.chain(*windows)) == places
    trained = [batches(index).mask.sum().item() for index in range(10)]
    result = [record for record in records(tmp_path) if record["kind"] == "train"]
    assert [record["step"] for record in result] == [1, 2, 3, 4]
    assert [record["trained_tokens"] for record in result] == [
        sum(trained[:count]) for count in (3, 6, 9, 10)
    ]
    assert checkpoint.list_checkpoints(tmp_path / "checkpoints") == [2, 4]


def test_callbacks_get_the_logged_loss_of_completions(tmp_path):
    class Completions(TrainStep):
        """Its loss is divided by another number than that of the tokens."""

        def __call__(self, *arguments):
            return super().__call__(*arguments)._replace(loss_count=mx.array(2.0))

    class Record(Callback):
        losses = ()

        def on_step(self, state):
            self.losses += (state.loss,)

    trainer = make_trainer(tmp_path, logging_steps=1)
    trainer.step = make_step(Tiny(), Completions)
    trainer.on_event = CallbackList([record := Record()]).call
    trainer.train()
    logged = [r["loss"] for r in records(tmp_path) if r["kind"] == "train"]
    assert list(record.losses) == pytest.approx(logged)


def test_nan_batch_holds_all_micro_batches(tmp_path):
    trainer = make_trainer(tmp_path, learning_rate=lambda step: math.nan)
    trainer.indices = lambda step: range(2 * step, 2 * step + 2)
    with pytest.raises(UserError, match="NaN or infinite at step 2"):
        trainer.train()
    batch = make_batches()
    window = [batch(2 + index) for index in range(2)]
    record = json.loads((tmp_path / "nan_batch.json").read_text())
    assert record["examples"] == [place for one in window for place in one.where]
    assert len(record["tokens"]) == sum(len(one.tokens) for one in window)


# Kills that leave different files on disk: owner, name and number of the call.
MOMENTS = {
    "before the first checkpoint": (TrainStep, "__call__", 3),
    "in the middle": (TrainStep, "__call__", 6),
    "in the first evaluation": (RunLogger, "sample", 1),
    "after a line of metrics": (RunLogger, "metrics", 4),
    "while saving the second": (mx, "save_safetensors", 2),
    "with the weights saved": (artifacts, "_write_index", 2),
    "before deleting the oldest": (artifacts, "remove", 1),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_resume_after_kill_is_exact(tmp_path, monkeypatch, expected, moment):
    with killed_at(MOMENTS[moment], monkeypatch):
        make_trainer(tmp_path).train()
    remove_partial_files(tmp_path)
    trainer = make_trainer(tmp_path)
    assert outcome(tmp_path, trainer, trainer.train()) == expected


@pytest.mark.parametrize(
    ("scores", "patience", "selected", "last"),
    [
        ([1.0, 3.0, 2.0, 2.5], None, 4, STEPS),
        ([1.0, 3.0, 2.0, 4.0], None, STEPS, STEPS),
        ([5.0, 3.0, 2.0, 4.0], None, 0, STEPS),
        ([1.0, 3.0, 2.0, 4.0], 1, 4, 8),
    ],
    ids=["middle", "last", "first", "early stop"],
)
def test_the_highest_score_is_selected(tmp_path, scores, patience, selected, last):
    """Though the loss falls to the end."""
    by_step = dict(zip((0, 4, 8, STEPS), scores, strict=True))
    trainer = make_trainer(
        tmp_path,
        on_evaluate=by_step.get,
        load_best_at_end=True,
        early_stopping_patience=patience,
    )
    loss = trainer.train()
    losses = [r["loss"] for r in records(tmp_path) if r["kind"] == "valid"]
    assert losses == sorted(losses, reverse=True)
    assert trainer.progress.step == last
    assert trainer.selected_step == selected
    assert loss == losses[[*by_step].index(selected)]
    assert trainer.step.evaluate(make_eval_batches()).loss_sum == pytest.approx(
        loss * trainer.step.evaluate(make_eval_batches()).loss_count
    )


def test_finished_training_is_not_repeated(tmp_path, expected):
    make_trainer(tmp_path).train()
    trainer = make_trainer(tmp_path, learning_rate=pytest.fail)
    assert outcome(tmp_path, trainer, trainer.train()) == expected


def test_resume_refuses_changed_examples(tmp_path):
    make_trainer(tmp_path).train()
    trainer = make_trainer(tmp_path)
    trainer.batches = make_batches(seed=9)
    with pytest.raises(UserError, match="examples or rewards have changed"):
        trainer.train()


def test_metal_keeps_less_of_freed_arrays_during_the_training(tmp_path, monkeypatch):
    limits = [999]

    def set_limit(limit):
        limits.append(limit)
        return limits[-2]

    monkeypatch.setattr(mx, "device_info", lambda: {memory.WORKING_SET: 8000})
    monkeypatch.setattr(mx, "set_cache_limit", set_limit)
    make_trainer(tmp_path / "run", steps=1).train()
    assert limits == [999, 2000, 999]


def test_seed_changes_dropout(tmp_path, expected):
    """Negative control: dropout is active and changes the weights."""
    trainer = make_trainer(tmp_path, seed=6)
    assert outcome(tmp_path, trainer, trainer.train())[0] != expected[0]


@pytest.mark.parametrize(
    ("kind", "at"),
    [(signal.SIGINT, 4), (signal.SIGTERM, 1), (signal.SIGTERM, STEPS - 1)],
)
def test_signal_saves_after_the_running_step(tmp_path, expected, kind, at):
    def rate(step):
        if step == at:
            signal.raise_signal(kind)
        return 1e-2

    with (
        pytest.raises(Interrupted, match=f"stopped after step {at + 1}; saved"),
        stop_requested(kind) as stopping,
    ):
        make_trainer(tmp_path, learning_rate=rate).train(stopping)
    assert checkpoint.list_checkpoints(tmp_path / "checkpoints")[-1] == at + 1
    trainer = make_trainer(tmp_path)
    assert outcome(tmp_path, trainer, trainer.train()) == expected


def test_several_ranks_stop_after_the_step_with_a_request(tmp_path):
    """They go by the sum of their requests: the others would wait for one."""
    trainer = make_trainer(tmp_path)
    trainer.ranks = Communicator()
    trainer.ranks.size = 2
    with pytest.raises(Interrupted, match="stopped after step 4; saved"):
        trainer.train(lambda: trainer.progress.step >= 3)


def test_nan_loss_stops_training(tmp_path):
    trainer = make_trainer(
        tmp_path, learning_rate=lambda step: 1e38 if step >= 4 else 1e-2
    )
    with pytest.raises(UserError, match="NaN or infinite at step") as caught:
        trainer.train()
    batch = make_batches()
    record = json.loads((tmp_path / "nan_batch.json").read_text())
    step = record["step"]
    assert f"at step {step}" in caught.value.message
    assert caught.value.code == 1
    assert caught.value.place.split(", ") == list(batch(step - 1).where)
    assert record["tokens"] == batch(step - 1).tokens.tolist()
    assert "nan_batch.json" in caught.value.hint
    # The earlier checkpoint is valid: with a finite learning rate the run ends.
    assert checkpoint.list_checkpoints(tmp_path / "checkpoints")[0] == 3
    assert math.isfinite(make_trainer(tmp_path).train())


def test_tokens_per_second_counts_the_time_to_launch_a_step(tmp_path, monkeypatch):
    """Launching a step may wait for it; then the last step seemed to take no time."""
    launch, wait = mx.async_eval, 0.05

    def launch_and_wait(*arrays):
        launch(*arrays)
        time.sleep(wait)

    monkeypatch.setattr(mx, "async_eval", launch_and_wait)
    changes = {"logging_steps": 1, "eval_steps": 4, "save_steps": 3, "steps": 11}
    make_trainer(tmp_path, **changes).train()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    steps = [r for r in map(json.loads, lines) if r["kind"] == "train"]
    assert len(steps) == 11
    trained = [0, *(step["trained_tokens"] for step in steps)]
    most = max(after - before for before, after in itertools.pairwise(trained))
    # A busy machine makes steps slower, and nothing makes them faster than the wait.
    assert all(step["trained_tokens_per_second"] <= most / wait for step in steps)
