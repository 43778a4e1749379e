"""Best checkpoint and early stopping, with and without interruptions."""

import mlx.core as mx
import pytest
from lmx.files import artifacts
from lmx.files.atomic import remove_partial_files
from lmx.training import checkpoint
from test_trainer import killed_at, make_batches, make_trainer, outcome, records

# The loss falls up to this step. Then the learning rate is negative.
BEST = 4
BEST_OF_ONE = {"save_total_limit": 1, "load_best_at_end": True}
BOTH = BEST_OF_ONE | {"early_stopping_patience": 3}


def learning_rate_turning_negative(step):
    return 1e-2 if step < BEST else -1e-2


def new_trainer(folder, learning_rate=learning_rate_turning_negative, **changes):
    config = {"steps": 20, "logging_steps": 3, "eval_steps": 2, "save_steps": 3}
    return make_trainer(folder, learning_rate=learning_rate, **config | changes)


def weights(trainer):
    return {k: bytes(memoryview(v)) for k, v in trainer.step.parameters.items()}


def valid_losses(folder):
    return {r["step"]: r["loss"] for r in records(folder) if r["kind"] == "valid"}


def names(folder):
    return checkpoint.list_checkpoints(folder / "checkpoints")


def test_load_best_at_end_selects_the_lowest_loss(tmp_path, capsys):
    trainer = new_trainer(tmp_path / "best", steps=12, **BEST_OF_ONE)
    loss = trainer.train()
    losses = valid_losses(tmp_path / "best")
    assert loss == losses[BEST] == min(losses.values())
    assert (trainer.selected_step, trainer.progress.step) == (BEST, 12)
    assert names(tmp_path / "best") == [BEST, 12]
    message = f"keeping step 4 of 12: validation loss {loss:#.4g} against "
    message += f"{losses[12]:#.4g} after the last step"
    assert message in (tmp_path / "best/log.txt").read_text()
    short = new_trainer(tmp_path / "short", steps=BEST)
    assert short.train() == loss
    assert weights(trainer) == weights(short)


def test_last_weights_are_the_default(tmp_path):
    trainer = new_trainer(tmp_path, steps=12, save_total_limit=3)
    losses = trainer.train(), valid_losses(tmp_path)
    assert losses[0] == losses[1][12] > losses[1][BEST]
    assert trainer.selected_step == 12
    assert names(tmp_path) == [6, 9, 12]


def test_load_best_at_end_can_select_the_initial_weights(tmp_path):
    trainer = new_trainer(tmp_path, lambda step: -1e-2, **BOTH)
    before = weights(trainer)
    assert trainer.train() == valid_losses(tmp_path)[0]
    assert (trainer.selected_step, trainer.progress.step) == (0, 6)
    assert weights(trainer) == before


def test_early_stopping(tmp_path):
    trainer = new_trainer(tmp_path, early_stopping_patience=3)
    loss = trainer.train()
    losses = valid_losses(tmp_path)
    assert list(losses) == [0, 2, 4, 6, 8, 10]
    assert loss == losses[10]
    log = (tmp_path / "log.txt").read_text()
    assert "the validation loss has not improved since step 4" in log
    # Tokens after the last logged step count too.
    masks = [make_batches()(step).mask.sum().item() for step in range(10)]
    assert trainer.progress.trained_tokens == sum(masks)


def test_early_stopping_counts_from_the_last_improvement(tmp_path):
    """Every second pair of steps increases the loss, never two evaluations in turn."""
    trainer = new_trainer(
        tmp_path,
        lambda step: -1e-3 if step % 4 > 1 else 1e-2,
        early_stopping_patience=2,
    )
    trainer.train()
    assert trainer.progress.step == 20


def test_damaged_best_checkpoint_falls_back_to_the_last(tmp_path, capsys):
    trainer = new_trainer(tmp_path, steps=12, **BEST_OF_ONE)
    save = trainer._save

    def save_damaged():
        path = save()
        if trainer.progress.step == BEST:
            (path / checkpoint.WEIGHTS).write_bytes(b"gone")
        return path

    trainer._save = save_damaged
    assert trainer.train() == valid_losses(tmp_path)[12]
    assert trainer.selected_step == 12
    assert (
        "the best checkpoint, of step 4, is damaged or missing"
        in capsys.readouterr().err
    )


# Kills that leave different files on disk: owner, name and number of the call.
MOMENTS = {
    "after the best evaluation, before its save": (mx, "save_safetensors", 4),
    "before the last best is deleted": (artifacts, "remove", 1),
    "before the best is loaded": (checkpoint, "load_weights", 1),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    trainer = new_trainer(folder, **BOTH)
    return (
        outcome(folder, trainer, trainer.train()),
        trainer.selected_step,
        names(folder),
    )


@pytest.mark.parametrize("moment", MOMENTS)
def test_resume_after_kill_selects_the_same_weights(
    tmp_path, monkeypatch, expected, moment
):
    with killed_at(MOMENTS[moment], monkeypatch):
        new_trainer(tmp_path, **BOTH).train()
    remove_partial_files(tmp_path)
    trainer = new_trainer(tmp_path, **BOTH)
    assert (
        outcome(tmp_path, trainer, trainer.train()),
        trainer.selected_step,
        names(tmp_path),
    ) == expected
    assert trainer.selected_step == BEST
