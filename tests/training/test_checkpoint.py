"""Checkpoints are complete or skipped, and restore every bit."""

import mlx.core as mx
import pytest
from folder_damages import DAMAGES
from lmx.errors import UserError
from lmx.training import checkpoint
from lmx.training.checkpoint import TrainingProgress
from lmx.training.step import TrainStep
from mlx.utils import tree_flatten
from tiny_llamas import llama, tokens_of
from tiny_steps import Tiny, make_step, random_batch


def trained(steps: int) -> TrainStep:
    step = make_step(Tiny(dropout=0.3), max_grad_norm=1.0, weight_decay=0.1)
    for number in range(steps):
        advance(step, number)
    return step


def advance(step, number):
    mx.eval(step(random_batch(seed=number), 1e-2, number), step.parameters)


def bits(step) -> dict[str, bytes]:
    parts = [step.parameters, step.optimizer.state]
    return {k: bytes(memoryview(v)) for k, v in tree_flatten(parts)}


@pytest.fixture
def two_checkpoints(tmp_path):
    """A folder with checkpoints of steps 2 and 4."""
    step = trained(2)
    checkpoint.save(tmp_path, step, TrainingProgress(2))
    advance(step, 2)
    advance(step, 3)
    checkpoint.save(tmp_path, step, TrainingProgress(4))
    return tmp_path


def test_restore_is_bit_exact(tmp_path):
    step = trained(3)
    progress = TrainingProgress(3, 70, 1.5, 0.1 + 0.2, 12, 0.7, 2.25)
    checkpoint.save(tmp_path, step, progress)
    other = trained(1)
    assert checkpoint.restore(tmp_path, other, pytest.fail) == progress
    assert bits(other) == bits(step)
    # The compiled step continues from the restored state, not from the traced one.
    advance(step, 3)
    advance(other, 3)
    assert bits(other) == bits(step)
    assert bits(other) != bits(trained(3))


@pytest.mark.parametrize(
    ("optimizer", "window"),
    [
        *(("adamw", 3), ("adamw_8bit", 3), ("adafactor", 1)),
        *(("lion_8bit", 1), ("muon", 1), ("sgd", 1)),
    ],
)
def test_resume_is_bit_exact_for_every_optimizer(tmp_path, optimizer, window):
    def new_step():
        # Adapters of this model are too small for 8-bit moments.
        adapter = {} if "8bit" in optimizer else {"dropout": 0.3}
        model, _ = llama("lora" if adapter else "full", **adapter)
        return make_step(model, name=optimizer, weight_decay=0.1)

    def train(step, first, last):
        for number in range(first, last):
            batches = [tokens_of(seed=number + i) for i in range(window)]
            mx.eval(step(batches, 1e-2, number), step.parameters)

    uninterrupted, start, restored = new_step(), new_step(), new_step()
    train(uninterrupted, 0, 5)
    train(start, 0, 2)
    checkpoint.save(tmp_path, start, TrainingProgress(2))
    # Steps before the restore must have no effect.
    train(restored, 7, 8)
    checkpoint.restore(tmp_path, restored, pytest.fail)
    assert bits(restored) == bits(start)
    train(restored, 2, 5)
    assert bits(restored) == bits(uninterrupted)
    assert bits(restored) != bits(start)


def test_restore_without_checkpoint_keeps_the_state(tmp_path):
    step = trained(1)
    before = bits(step)
    assert (
        checkpoint.restore(tmp_path / "none", step, pytest.fail) == TrainingProgress()
    )
    assert bits(step) == before


def test_save_total_limit_is_two_by_default(two_checkpoints):
    checkpoint.save(two_checkpoints, trained(1), TrainingProgress(5))
    assert checkpoint.list_checkpoints(two_checkpoints) == [4, 5]


def folder_of(checkpoints, number):
    return checkpoints / checkpoint.KIND / f"{number:07d}" / "content"


def test_restore_skips_damaged_checkpoints_with_a_warning(two_checkpoints):
    DAMAGES["flip"](folder_of(two_checkpoints, 4))
    step, warnings = trained(1), []
    assert checkpoint.restore(two_checkpoints, step, warnings.append).step == 2
    assert bits(step) == bits(trained(2))
    [warning] = warnings
    assert "0000004 is damaged" in warning
    DAMAGES["cut"](folder_of(two_checkpoints, 2))
    restored = checkpoint.restore(two_checkpoints, step, warnings.append)
    assert restored == TrainingProgress()
    assert len(warnings) == 3


def test_checkpoint_of_another_model_is_skipped(tmp_path):
    """A traceback without this check: a tensor is missing."""
    model, _ = llama("lora")
    checkpoint.save(tmp_path, make_step(model), TrainingProgress(2))
    step, warnings = trained(1), []
    assert checkpoint.restore(tmp_path, step, warnings.append) == TrainingProgress()
    assert bits(step) == bits(trained(1))
    assert len(warnings) == 1
    assert not checkpoint.load_weights(tmp_path, step, 2)


def test_save_deletes_damaged_newer_checkpoints(two_checkpoints):
    DAMAGES["cut"](folder_of(two_checkpoints, 4))
    checkpoint.save(two_checkpoints, trained(3), TrainingProgress(3))
    assert checkpoint.list_checkpoints(two_checkpoints) == [2, 3]


def test_failed_save_keeps_older_checkpoints(two_checkpoints, monkeypatch):
    def fail(path, *_, **__):
        with open(path, "wb") as stream:
            stream.write(b"half")
        raise RuntimeError("[write] Unable to write 3900096 bytes to file.")

    monkeypatch.setattr(mx, "save_safetensors", fail)
    with pytest.raises(UserError, match="cannot write") as caught:
        checkpoint.save(two_checkpoints, trained(1), TrainingProgress(6))
    assert caught.value.code == 1
    assert checkpoint.list_checkpoints(two_checkpoints) == [2, 4]
    assert checkpoint.restore(two_checkpoints, trained(1), pytest.fail).step == 4


def test_save_checks_free_space_first(two_checkpoints, monkeypatch):
    monkeypatch.setattr("lmx.files.atomic.free_bytes", lambda path: 1000)
    with pytest.raises(UserError, match=r"this needs .* MB, and 0 MB are free"):
        checkpoint.save(two_checkpoints, trained(1), TrainingProgress(6))
    assert checkpoint.list_checkpoints(two_checkpoints) == [2, 4]
