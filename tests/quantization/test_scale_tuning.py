"""Scale tuning stores the trained values and is never worse than the start."""

import shutil

import mlx.core as mx
import mlx.optimizers as optimizers
import numpy as np
import pytest
from folder_damages import DAMAGES
from lmx.config import quantize
from lmx.config.quantize import ScaleTuningConfig
from lmx.files.artifacts import ArtifactStore
from lmx.interfaces import Logger
from lmx.models.loader import load
from lmx.pipeline.quantize import candidates
from lmx.pipeline.quantize.candidates import CandidateModel
from lmx.pipeline.quantize.scale_tuning import KIND, KINDS, ScaleTuner
from lmx.run.logger import RunLogger
from lmx.training import checkpoint
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
    step = tuner._new_step()
    step.parameters.update({k: v.astype(mx.float32) for k, v in tensors.items()})
    values = dict(tree_flatten(step.materialize().parameters()))
    assert all(
        mx.array_equal(values[k].astype(mx.float16), v) for k, v in tensors.items()
    )


@pytest.mark.parametrize("chunk", [None, 7])
def test_gradients_match_finite_differences(case, tmp_path, chunk, monkeypatch):
    """Covers biases, scales around the middle code, and logits in chunks."""
    if chunk:
        monkeypatch.setattr(candidates, "MANY_LOGITS", 0)
        monkeypatch.setattr(candidates, "loss_chunk", lambda *_, **__: chunk)
    tuner = tuner_of(case, tmp_path)
    tuner.model.dtype = mx.float32
    step, training = tuner._new_step(), case[1]
    assert step._loss_model.uses_places == bool(chunk)
    start, recorded = dict(step.parameters), {}
    monkeypatch.setattr(
        optimizers.Adam,
        "apply_gradients",
        lambda _, gradients, origin: recorded.update(gradients) or origin,
    )
    step.model.train()
    sums, gradients = step._gradients(*training.batch(0).arrays())
    step._update(gradients, *sums, mx.array(0.0), mx.array(0.0))
    norm = np.sqrt(sum(np.square(np.array(g)).sum() for g in recorded.values()))
    assert norm < 1, "the gradients were clipped"
    # This value of the first layer has the largest gradient.
    path = next(iter(tuner.model.affine_layers))
    place = int(mx.argmax(mx.abs(recorded[f"{path}.biases"])).item())
    middle, unit = 3.5, step.optimizer._units[path].item()

    def loss(kind, width):
        values = {k: np.array(v, np.float64) for k, v in start.items()}
        scales, biases = (values[f"{path}.{k}"].reshape(-1) for k in KINDS)
        if kind == "biases":
            biases[place] += width * unit
        else:
            scales[place] += width * unit * 2 / middle
            biases[place] -= width * unit * 2
        masters = {k: mx.array(v, mx.float32) for k, v in values.items()}
        tuner.model.set_tensors(masters)
        return _divergence(tuner.model.model(training.tokens[0]), training[0])

    for kind in KINDS:
        gradient = (loss(kind, 0.03) - loss(kind, -0.03)) / 0.06
        found = recorded[f"{path}.{kind}"].reshape(-1)[place].item()
        assert found == pytest.approx(gradient, rel=0.02, abs=1e-6)


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
    start = dict(tuner._initial)
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
    assert checkpoint.list_checkpoints(tuner._folder) == [1]


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
        step = tuner._new_step()
        losses = [tuner._train_step(step, n, 3, 1e-2).item() for n in range(3)]
        results.append((losses, step.parameters, step.optimizer.state["step"].item()))
    (losses, masters, steps), (expected_losses, expected, _) = results
    assert steps == 3
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    for kind in KINDS:
        # If a gradient is almost zero, Adam amplifies the order of a sum.
        names = [name for name in masters if name.endswith(kind)]
        close = [np.isclose(masters[k], expected[k], atol=2e-5) for k in names]
        assert np.concatenate(close, axis=None).mean() > 0.995


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
    assert checkpoint.list_checkpoints(second._folder)[-1] > 0
    tensors = second.run()
    for name in expected:
        assert mx.array_equal(expected[name], tensors[name])


@OF_LLAMA
def test_other_settings_start_a_new_run(case, tuned, tmp_path):
    folder = shutil.copytree(tuned[1], tmp_path / "copy")
    saved = checkpoint.list_checkpoints(tuner_of(case, folder)._folder)
    assert saved[-1] == CONFIG.steps
    assert not checkpoint.list_checkpoints(tuner_of(case, folder, steps=13)._folder)


@OF_LLAMA
def test_damaged_state_starts_a_new_run(case, tuned, tmp_path):
    shutil.copytree(tuned[1] / KIND, tmp_path / KIND)
    logger, warnings = Logger(), []
    logger.warning = warnings.append
    tuner = tuner_of(case, tmp_path, logger=logger)
    states = sorted(tuner._folder.glob("steps/*/content"))
    for state in states:
        DAMAGES["flip"](state)
    tensors = tuner.run()
    assert len(warnings) == len(states)
    assert all("is damaged" in warning for warning in warnings)
    assert all(mx.array_equal(value, tensors[k]) for k, value in tuned[3].items())


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
