"""Scale tuning: what is trained is what is stored, and never worse than its start."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.config import quantize
from lmx.config.quantize import ScaleTuningConfig
from lmx.models.loader import load
from lmx.quantization.ptq.candidates import CandidateModel
from lmx.quantization.ptq.scale_tuning import KINDS, ScaleTuner
from lmx.run.logger import RunLogger
from lmx.training.teacher_cache import cache_part_targets
from mlx.utils import tree_flatten
from tiny_checkpoints import LLAMA, QWEN3_MOE

CONFIG = ScaleTuningConfig(steps=12, batch_tokens=64, learning_rate=1e-2, top_k=320)


def parts_of(seed, count):
    """Some tokens far more often than others, as in text."""
    share = mx.random.uniform(shape=(count, 2, 32), key=mx.random.key(seed))
    return list((320 * share**3).astype(mx.int32))


@pytest.fixture(scope="module", params=["llama", "experts"])
def case(request, make_checkpoint, tmp_path_factory):
    """Folders of a model and of the same one rounded, and the predictions of it."""
    from test_contract import quantize

    base = LLAMA if request.param == "llama" else QWEN3_MOE
    source = make_checkpoint(base, num_hidden_layers=1)
    folder = tmp_path_factory.mktemp("tune")
    quantize("rtn", source, folder / "q", bits=3)
    teacher = load(source).model
    settings = {"digest": "a", "top_k": 320, "info": lambda _: None}
    training = cache_part_targets(folder / "t", parts_of(1, 6), teacher, **settings)
    held_out = cache_part_targets(folder / "h", parts_of(2, 3), teacher, **settings)
    return folder / "q", training, held_out


def tuning(case, folder, config=CONFIG, logger=None, **changes):
    path, training, held_out = case
    student = CandidateModel(load(path).model, mx.float16)
    return ScaleTuner(
        config.model_copy(update=changes),
        student,
        training,
        held_out,
        folder=folder / "state",
        seed=3,
        logger=logger or RunLogger(None, quiet=True),
    )


@pytest.fixture(scope="module")
def tuned(case, tmp_path_factory):
    """A run that is done, its folder, how far off it began, and what it found."""
    folder = tmp_path_factory.mktemp("tuned")
    run = tuning(case, folder)
    start = run.student.divergence(case[2])
    return run, folder, start, run.run()


def test_it_comes_closer_and_the_codes_stay(case, tuned):
    path, _, held_out = case
    before = dict(tree_flatten(load(path).model.parameters()))
    run, _, start, found = tuned
    assert run.student.divergence(held_out) < 0.95 * start
    after = dict(tree_flatten(run.student.model.parameters()))
    assert found.keys() == {k for k in before if k.endswith(KINDS)}
    for name, value in before.items():
        assert mx.array_equal(value, after[name]) == (name not in found)


def test_what_is_stored_is_what_was_judged(case, tuned, tmp_path):
    """Written into a checkpoint and loaded anew, it predicts the same, bit for bit."""
    path, _, held_out = case
    run, *_, found = tuned
    assert all(value.dtype == mx.float16 for value in found.values())
    stored = mx.load(str(path / "model.safetensors")) | found
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    mx.save_safetensors(str(tmp_path / "model.safetensors"), stored)
    tokens = held_out.tokens[0]
    served = load(tmp_path).model(tokens)
    assert mx.array_equal(served, run.student.model(tokens))
    # The forward of training takes them so too.
    run._masters.update(run._vectors.joined(found))
    masters = run.student.served(run._vectors.cut(run._masters))
    assert all(mx.array_equal(masters[k].astype(mx.float16), found[k]) for k in found)


def test_gradients_are_those_of_finite_differences(case, tmp_path):
    """Of scales about the middle of their codes, and of biases."""
    run = tuning(case, tmp_path)
    run.student.dtype = mx.float32
    _, training, _ = case
    tokens, target = training.tokens[0], training[0]
    start = dict(run._masters)
    moved = {}
    run._optimizer.apply_gradients = lambda gradients, origin: (
        moved.update(gradients) or origin
    )
    run._add(tokens, training.counted[0], *target)
    run._move(mx.array(0.0))
    norm = np.sqrt(sum(np.square(np.array(g)).sum() for g in moved.values()))
    assert norm < 1, "clipped gradients are no gradients"
    # The number of the first layer that matters most.
    first = next(iter(run.student.affine.values())).scales.size
    place = int(mx.argmax(mx.abs(moved["biases"][:first])).item())
    middle, unit = 3.5, run._units[place].item()

    def loss(kind, step):
        values = {k: np.array(v, np.float64) for k, v in start.items()}
        if kind == "biases":
            values["biases"][place] += step * unit
        else:
            values["scales"][place] += step * unit * 2 / middle
            values["biases"][place] -= step * unit * 2
        masters = {k: mx.array(v, mx.float32) for k, v in values.items()}
        run.student.put(run._vectors.cut(masters))
        return _divergence(run.student.model(tokens), target)

    for kind in KINDS:
        slope = (loss(kind, 0.03) - loss(kind, -0.03)) / 0.06
        assert moved[kind][place].item() == pytest.approx(slope, rel=0.02, abs=1e-6)


def _divergence(logits, target):
    """In float64, of targets that hold the whole vocabulary."""
    x = np.array(logits.astype(mx.float32), np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    q = x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
    q = np.take_along_axis(q, np.array(target.indices), axis=-1)
    p = np.array(target.log_probs, np.float64)
    return (np.exp(p) * (p - q)).sum(axis=-1).mean()


@pytest.mark.parametrize("rate", [1e3, 1e30])
def test_what_only_harms_leaves_the_start(case, tmp_path, rate, capsys):
    run = tuning(case, tmp_path, learning_rate=rate, logger=RunLogger(None))
    start = run._stored()
    found = run.run()
    assert all(mx.array_equal(found[k], start[k]) for k in start)
    assert "the start, which is kept" in capsys.readouterr().out


def test_the_rate_is_found_by_trying(case, tmp_path, capsys):
    run = tuning(case, tmp_path, learning_rate=None, steps=1, logger=RunLogger(None))
    run.run()
    assert "taking 0.0" in capsys.readouterr().out
    assert run._optimizer.state["step"].item() == 1


def test_of_rates_none_is_tried_beyond_one_that_is_worse(
    case, tmp_path, monkeypatch, capsys
):
    run = tuning(case, tmp_path, learning_rate=None, steps=1, logger=RunLogger(None))
    found = iter([1.0, 0.5, 0.4, float("nan"), 0.3])
    monkeypatch.setattr(run, "_judged", lambda *_: next(found))
    run.run()
    assert (
        "0.0003: 0.5, 0.001: 0.4, 0.003: inf; taking 0.001" in capsys.readouterr().out
    )


def test_a_step_of_many_parts_is_that_of_one(case, tmp_path):
    """Though unlike numbers of their tokens count."""
    path, _, held_out = case
    teacher, parts = load(path).model, parts_of(5, 2)
    counted = [mx.arange(32) < n * mx.ones((2, 1)) for n in (30, 7)]
    whole = [mx.concatenate(parts)], [mx.concatenate(counted)]
    moved = []
    for name, (tokens, count) in {"parts": (parts, counted), "whole": whole}.items():
        settings = {"digest": "b", "top_k": 320, "info": lambda _: None}
        folder = tmp_path / name
        targets = cache_part_targets(
            folder, tokens, lambda x: 2 * teacher(x), counted=count, **settings
        )
        run = tuning((path, targets, held_out), folder, batch_tokens=128)
        losses = [run._trained(step, 3, 1e-2).item() for step in range(3)]
        moved.append((losses, run._masters, run._optimizer.state["step"].item()))
    (losses, masters, steps), (others, expected, _) = moved
    assert steps == 3
    np.testing.assert_allclose(losses, others, rtol=1e-4)
    for kind in KINDS:
        # Where a gradient is about nothing, Adam makes much of the order of a sum.
        assert np.isclose(masters[kind], expected[kind], atol=2e-5).mean() > 0.995


def test_a_killed_run_goes_on_exactly(case, tmp_path, monkeypatch):
    whole = tuning(case, tmp_path / "whole", learning_rate=None).run()
    killed = tuning(case, tmp_path, learning_rate=None)
    judged, calls = killed._judged, []

    def dying(*parts):
        calls.append(parts)
        # Of the start, of up to four rates, then of steps.
        if len(calls) == 5 + 5:
            raise KeyboardInterrupt
        return judged(*parts)

    monkeypatch.setattr(killed, "_judged", dying)
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    second = tuning(case, tmp_path, learning_rate=None)
    assert second._restored()["step"] > 0
    found = second.run()
    for name in whole:
        assert mx.array_equal(whole[name], found[name])


def test_another_start_is_tuned_anew(case, tuned):
    folder = tuned[1]
    assert tuning(case, folder)._restored()["step"] == CONFIG.steps
    assert tuning(case, folder, steps=13)._restored() is None


def test_only_scales_can_be_tuned():
    with pytest.raises(ValueError, match="no trainable scales"):
        quantize.RTNConfig(mode="mxfp4", scale_tuning={})
    assert quantize.RTNConfig().scale_tuning is None
    assert quantize.RTNConfig(scale_tuning=True).scale_tuning == ScaleTuningConfig()
    assert quantize.GPTQConfig(scale_tuning=False).scale_tuning is None
    assert quantize.GPTQConfig().scale_tuning == ScaleTuningConfig()
