"""The best weights are left and a vain training ends, whatever happens on the way."""

import mlx.core as mx
import pytest
from lmx.run.fs import sweep
from lmx.run.logger import RunLogger
from lmx.training import checkpoint
from lmx.training.checkpoint_policy import CheckpointPolicy
from lmx.training.step import TrainStep
from lmx.training.trainer import TrainerIntervals
from test_loop import killed_at, make_loop, make_loop_batches, outcome, rows

# Steps up to which the training improves; it goes uphill from there.
BEST = 4
BOTH = CheckpointPolicy(1, best=True, patience=3)


def turning(step):
    return 1e-2 if step < BEST else -1e-2


def make(folder, keep, rate=turning, steps=20):
    folder.mkdir(exist_ok=True)
    loop = make_loop(folder, rate=rate, steps=steps)
    loop.keep, loop.cadence = keep, TrainerIntervals(3, 2, 3, folder / "checkpoints")
    return loop


def weights(loop):
    return {k: bytes(memoryview(v)) for k, v in loop.step.parameters.items()}


def valid_rows(folder):
    return {r["step"]: r["loss"] for r in rows(folder) if r["kind"] == "valid"}


def names(folder):
    return [int(path.name) for path in checkpoint.numbered(folder / "checkpoints")]


def test_the_best_weights_are_left(tmp_path, capsys):
    loop = make(tmp_path / "best", CheckpointPolicy(1, best=True), steps=12)
    loss = loop.run()
    losses = valid_rows(tmp_path / "best")
    assert loss == losses[BEST] == min(losses.values())
    assert (loop.left, loop.progress.step) == (BEST, 12)
    assert names(tmp_path / "best") == [BEST, 12]
    told = f"keeping step 4 of 12: validation loss {loss:#.4g}, the last had "
    assert told + f"{losses[12]:#.4g}" in (tmp_path / "best/log.txt").read_text()
    short = make(tmp_path / "short", CheckpointPolicy(), steps=BEST)
    assert short.run() == loss
    assert weights(loop) == weights(short)


def test_the_last_weights_are_left_unless_asked(tmp_path):
    loop = make(tmp_path, CheckpointPolicy(3), steps=12)
    losses = loop.run(), valid_rows(tmp_path)
    assert losses[0] == losses[1][12] > losses[1][BEST]
    assert loop.left == 12
    assert names(tmp_path) == [6, 9, 12]


def test_a_training_that_only_harms_leaves_what_it_began_with(tmp_path):
    loop = make(tmp_path, BOTH, rate=lambda step: -1e-2)
    before = weights(loop)
    assert loop.run() == valid_rows(tmp_path)[0]
    assert (loop.left, loop.progress.step) == (0, 6)
    assert weights(loop) == before


def test_a_vain_training_ends(tmp_path):
    loop = make(tmp_path, CheckpointPolicy(patience=3))
    loss = loop.run()
    losses = valid_rows(tmp_path)
    assert list(losses) == [0, 2, 4, 6, 8, 10]
    assert loss == losses[10]
    log = (tmp_path / "log.txt").read_text()
    assert "stopping at step 10 of 20: no validation since step 4 had a lower" in log
    # Also what came after the last line of the report was trained on.
    masks = [make_loop_batches()(step).mask.sum().item() for step in range(10)]
    assert loop.progress.trained_tokens == sum(masks)


def test_a_lower_loss_begins_the_wait_anew(tmp_path):
    """Every second pair of steps goes uphill: never two validations in vain."""
    loop = make(
        tmp_path,
        CheckpointPolicy(patience=2),
        rate=lambda s: -1e-3 if s % 4 > 1 else 1e-2,
    )
    loop.run()
    assert loop.progress.step == 20


def test_a_damaged_best_is_told_and_the_last_is_left(tmp_path, capsys):
    loop = make(tmp_path, CheckpointPolicy(1, best=True), steps=12)
    save = loop.keep.save

    class Damaging(CheckpointPolicy):
        def save(self, folder, step, progress):
            saved = save(folder, step, progress)
            if progress.step == BEST:
                (saved / checkpoint.WEIGHTS).write_bytes(b"gone")
            return saved

    loop.keep = Damaging(1, best=True)
    assert loop.run() == valid_rows(tmp_path)[12]
    assert loop.left == 12
    assert "step 4, the best one, is damaged or gone" in capsys.readouterr().err


# What leaves something else on disk when the process dies there.
MOMENTS = {
    "in the first save, of step 0": (mx, "save_safetensors", 1),
    "after the best validation, before its save": (mx, "save_safetensors", 4),
    "before the last best is dropped": (checkpoint.shutil, "rmtree", 4),
    "while waiting": (TrainStep, "__call__", 8),
    "in the last validation": (RunLogger, "sample", 6),
    "while the best is put back": (checkpoint, "_fill_parameters", 1),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    loop = make(folder, BOTH)
    return outcome(folder, loop, loop.run()), loop.left, names(folder)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_changes_neither_the_best_nor_the_end(
    tmp_path, monkeypatch, expected, moment
):
    with killed_at(MOMENTS[moment], monkeypatch):
        make(tmp_path, BOTH).run()
    sweep(tmp_path)
    loop = make(tmp_path, BOTH)
    assert (outcome(tmp_path, loop, loop.run()), loop.left, names(tmp_path)) == expected
    assert loop.left == BEST
