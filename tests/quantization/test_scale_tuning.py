"""Scale tuning stores the trained values and is never worse than the start."""

import shutil

import mlx.core as mx
import numpy as np
import pytest
from folder_damages import DAMAGES
from lmx.config import quantize
from lmx.config.quantize import ScaleTuningConfig
from lmx.files.artifacts import ArtifactStore
from lmx.interfaces import Logger
from lmx.models.loader import load
from lmx.quantization.ptq import candidates
from lmx.quantization.ptq.candidates import CandidateModel
from lmx.quantization.ptq.scale_tuning import KIND, KINDS, ScaleTuner
from lmx.run.logger import RunLogger
from lmx.training.teacher_cache import cache_part_targets
from mlx.utils import tree_flatten
from tiny_checkpoints import LLAMA, QWEN3_MOE

CONFIG = ScaleTuningConfig(steps=12, batch_tokens=64, learning_rate=1e-2)


def parts_of(seed, count):
    """Return tokens with uneven frequencies, as in text."""
    share = mx.random.uniform(shape=(count, 2, 32), key=mx.random.key(seed))
    return list((320 * share**3).astype(mx.int32))


@pytest.fixture(scope="module", params=["llama", "experts"])
def case(request, make_checkpoint, tmp_path_factory):
    """A quantized model with training and held-out predictions of the original."""
    from test_ptq_methods import quantize

    base = LLAMA if request.param == "llama" else QWEN3_MOE
    source = make_checkpoint(base, num_hidden_layers=1)
    folder = tmp_path_factory.mktemp("tune")
    quantize("rtn", source, folder / "q", bits=3)
    teacher = load(source).model
    settings = {"digest": "a", "top_k": 320, "logger": Logger()}
    store = ArtifactStore(folder, print)
    training = cache_part_targets(store, "t", parts_of(1, 6), teacher, **settings)
    held_out = cache_part_targets(store, "h", parts_of(2, 3), teacher, **settings)
    return folder / "q", training, held_out


def tuner_of(case, folder, config=CONFIG, logger=None, **changes):
    path, training, held_out = case
    model = CandidateModel(load(path).model, mx.float16)
    return ScaleTuner(
        config.model_copy(update=changes),
        model,
        training,
        held_out,
        store=ArtifactStore(folder, (logger or Logger()).warning),
        seed=3,
        logger=logger or RunLogger(None, quiet=True),
    )


@pytest.fixture(scope="module")
def tuned(case, tmp_path_factory):
    """A finished run, its folder, its initial divergence and its tensors."""
    folder = tmp_path_factory.mktemp("tuned")
    tuner = tuner_of(case, folder)
    start = tuner.model.divergence(case[2])
    return tuner, folder, start, tuner.run()


def test_tuning_reduces_the_divergence_and_keeps_codes(case, tuned):
    path, _, held_out = case
    before = dict(tree_flatten(load(path).model.parameters()))
    tuner, _, start, tensors = tuned
    assert tuner.model.divergence(held_out) < 0.95 * start
    after = dict(tree_flatten(tuner.model.model.parameters()))
    assert tensors.keys() == {k for k in before if k.endswith(KINDS)}
    for name, value in before.items():
        assert mx.array_equal(value, after[name]) == (name not in tensors)


def test_stored_scales_give_the_evaluated_predictions(case, tuned, tmp_path):
    """A checkpoint with the tuned tensors predicts the same, bit for bit."""
    path, _, held_out = case
    tuner, *_, tensors = tuned
    assert all(value.dtype == mx.float16 for value in tensors.values())
    stored = mx.load(str(path / "model.safetensors")) | tensors
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    mx.save_safetensors(str(tmp_path / "model.safetensors"), stored)
    tokens = held_out.tokens[0]
    logits = load(tmp_path).model(tokens)
    assert mx.array_equal(logits, tuner.model.model(tokens))
    # The forward pass of training uses the same values.
    tuner._masters.update(tuner._flat.flatten(tensors))
    values = tuner.model.forward_values(tuner._flat.unflatten(tuner._masters))
    assert all(mx.array_equal(values[k].astype(mx.float16), tensors[k]) for k in values)


@pytest.mark.parametrize("chunk", [None, 7])
def test_gradients_match_finite_differences(case, tmp_path, chunk, monkeypatch):
    """Covers biases, scales around the middle code, and logits in chunks."""
    if chunk:
        monkeypatch.setattr(candidates, "MANY_LOGITS", 0)
        monkeypatch.setattr(candidates, "loss_chunk", lambda *_, **__: chunk)
    tuner = tuner_of(case, tmp_path)
    tuner.model.dtype = mx.float32
    _, training, _ = case
    tokens, target = training.tokens[0], training[0]
    start = dict(tuner._masters)
    recorded = {}
    tuner._optimizer.apply_gradients = lambda gradients, origin: (
        recorded.update(gradients) or origin
    )
    tuner._add(tokens, training.counted[0], *target)
    tuner._update(mx.array(0.0))
    norm = np.sqrt(sum(np.square(np.array(g)).sum() for g in recorded.values()))
    assert norm < 1, "the gradients were clipped"
    # This value of the first layer has the largest gradient.
    first = next(iter(tuner.model.affine_layers.values())).scales.size
    place = int(mx.argmax(mx.abs(recorded["biases"][:first])).item())
    middle, unit = 3.5, tuner._units[place].item()

    def loss(kind, step):
        values = {k: np.array(v, np.float64) for k, v in start.items()}
        if kind == "biases":
            values["biases"][place] += step * unit
        else:
            values["scales"][place] += step * unit * 2 / middle
            values["biases"][place] -= step * unit * 2
        masters = {k: mx.array(v, mx.float32) for k, v in values.items()}
        tuner.model.set_tensors(tuner._flat.unflatten(masters))
        return _divergence(tuner.model.model(tokens), target)

    for kind in KINDS:
        gradient = (loss(kind, 0.03) - loss(kind, -0.03)) / 0.06
        assert recorded[kind][place].item() == pytest.approx(
            gradient, rel=0.02, abs=1e-6
        )


def _divergence(logits, target):
    """Return the divergence in float64, for targets with the full vocabulary."""
    x = np.array(logits.astype(mx.float32), np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    q = x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
    q = np.take_along_axis(q, np.array(target.indices), axis=-1)
    p = np.array(target.log_probs, np.float64)
    return (np.exp(p) * (p - q)).sum(axis=-1).mean()


# What does not depend on the kind of the layers.
OF_LLAMA = pytest.mark.parametrize("case", ["llama"], indirect=True)


@OF_LLAMA
@pytest.mark.parametrize("rate", [1e3, 1e30])
def test_harmful_tuning_keeps_the_start(case, tmp_path, rate, capsys):
    tuner = tuner_of(case, tmp_path, learning_rate=rate, logger=RunLogger(None))
    start = tuner._stored()
    tensors = tuner.run()
    assert all(mx.array_equal(tensors[k], start[k]) for k in start)
    assert "keeping the start" in capsys.readouterr().out


@OF_LLAMA
def test_probe_stops_at_a_worse_learning_rate(case, tmp_path, monkeypatch, capsys):
    tuner = tuner_of(
        case, tmp_path, learning_rate=None, steps=1, logger=RunLogger(None)
    )
    divergences = iter([1.0, 0.5, 0.4, float("nan"), 0.3])
    monkeypatch.setattr(tuner, "_evaluate", lambda *_: next(divergences))
    tuner.run()
    assert "0.0003: 0.5, 0.001: 0.4, 0.003: inf; using 0.001" in capsys.readouterr().out
    assert tuner._optimizer.state["step"].item() == 1


def test_step_does_not_depend_on_its_parts(case, tmp_path):
    """The parts have different numbers of counted tokens."""
    path, _, held_out = case
    teacher, parts = load(path).model, parts_of(5, 2)
    counted = [mx.arange(32) < n * mx.ones((2, 1)) for n in (30, 7)]
    joined = [mx.concatenate(parts)], [mx.concatenate(counted)]
    results = []
    for name, (tokens, count) in {"parts": (parts, counted), "joined": joined}.items():
        settings = {"digest": "b", "top_k": 320, "logger": Logger()}
        folder = tmp_path / name
        targets = cache_part_targets(
            ArtifactStore(folder, print),
            "targets",
            tokens,
            lambda x: 2 * teacher(x),
            counted=count,
            **settings,
        )
        tuner = tuner_of((path, targets, held_out), folder, batch_tokens=128)
        losses = [tuner._train_step(step, 3, 1e-2).item() for step in range(3)]
        results.append((losses, tuner._masters, tuner._optimizer.state["step"].item()))
    (losses, masters, steps), (expected_losses, expected, _) = results
    assert steps == 3
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    for kind in KINDS:
        # If a gradient is almost zero, Adam amplifies the order of a sum.
        assert np.isclose(masters[kind], expected[kind], atol=2e-5).mean() > 0.995


@OF_LLAMA
def test_killed_run_resumes_exactly(case, tmp_path, monkeypatch):
    expected = tuner_of(case, tmp_path / "expected", learning_rate=None).run()
    killed = tuner_of(case, tmp_path, learning_rate=None)
    evaluate, calls = killed._evaluate, []

    def interrupt(*parts):
        calls.append(parts)
        # The calls are the start, up to four learning rates, then steps.
        if len(calls) == 5 + 5:
            raise KeyboardInterrupt
        return evaluate(*parts)

    monkeypatch.setattr(killed, "_evaluate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    second = tuner_of(case, tmp_path, learning_rate=None)
    assert second._load()["step"] > 0
    tensors = second.run()
    for name in expected:
        assert mx.array_equal(expected[name], tensors[name])


@OF_LLAMA
def test_other_settings_start_a_new_run(case, tuned, tmp_path):
    folder = shutil.copytree(tuned[1], tmp_path / "copy")
    assert tuner_of(case, folder)._load()["step"] == CONFIG.steps
    assert tuner_of(case, folder, steps=13)._load() is None


@OF_LLAMA
def test_damaged_state_starts_a_new_run(case, tuned, tmp_path):
    shutil.copytree(tuned[1] / KIND, tmp_path / KIND)
    logger, warnings = Logger(), []
    logger.warning = warnings.append
    tuner = tuner_of(case, tmp_path, logger=logger)
    assert tuner._load()["step"] == CONFIG.steps
    [state] = (tmp_path / KIND).glob("*/content")
    DAMAGES["flip"](state)
    assert tuner._load() is None
    assert warnings == [f"{state}: damaged, made again"]


def test_scale_tuning_needs_an_affine_grid():
    with pytest.raises(ValueError, match="no trainable scales"):
        quantize.RTNConfig(mode="mxfp4", scale_tuning={})
    assert quantize.RTNConfig().scale_tuning is None
    assert quantize.RTNConfig(scale_tuning=True).scale_tuning == ScaleTuningConfig()
    assert quantize.GPTQConfig().scale_tuning is None


@pytest.mark.parametrize("effort", ["fast", "standard"])
def test_effort_sets_what_the_recipe_does_not_name(effort):
    config = quantize.GPTQConfig.model_validate({"effort": effort})
    standard = quantize.GPTQConfig()
    assert (config.refine_iters, config.output_hessian, config.rollback_if_worse) == {
        "fast": (0, False, False),
        "standard": (1, True, True),
    }[effort]
    assert (config.model_dump() == standard.model_dump()) == (effort == "standard")
    named = {"effort": effort, "refine_iters": 2, "scale_tuning": False}
    config = quantize.GPTQConfig.model_validate(named)
    assert (config.refine_iters, config.scale_tuning) == (2, None)
