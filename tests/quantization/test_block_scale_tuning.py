"""Scale tuning in mode nvfp4 stores what it trained, and keeps elements and zeros."""

import json

import mlx.core as mx
import numpy as np
import pytest
from lmx.config import quantize as quantize_config
from lmx.config.quantize import ScaleTuningConfig
from lmx.models.checkpoint import read_config
from lmx.models.float_formats import E4M3Scales
from lmx.models.loader import load
from lmx.quantization.ptq import candidates
from lmx.quantization.ptq.block_scale_tuning import LEARNING_RATE, BlockScaleTuner
from lmx.quantization.ptq.candidates import CandidateModel
from lmx.run.fs import write_atomic
from lmx.run.logger import NullLogger, RunLogger
from lmx.training.teacher_cache import cache_part_targets
from mlx.utils import tree_flatten
from test_scale_tuning import parts_of
from tiny_checkpoints import LLAMA, QWEN3_MOE

CONFIG = ScaleTuningConfig(steps=16, batch_tokens=64, learning_rate=1e-2, top_k=320)
EMPTY = "model.layers.0.mlp.down_proj", "model.layers.0.mlp.switch_mlp.down_proj"


@pytest.fixture(scope="module", params=["llama", "global_scale"])
def case(request, make_checkpoint, tmp_path_factory):
    """An unquantized model, one in nvfp4, and predictions of the first."""
    from test_ptq_methods import quantize

    base = LLAMA if request.param == "llama" else QWEN3_MOE
    source = make_checkpoint(base, num_hidden_layers=1)
    folder = tmp_path_factory.mktemp("tune")
    grid = {"mode": "nvfp4", "global_scale": request.param == "global_scale"}
    grid["overrides"] = {"*.q_proj": {"mode": "affine"}}
    quantize("rtn", source, folder / "q", **grid)
    file = str(folder / "q/model.safetensors")
    tensors = mx.load(file)
    for path in EMPTY:
        if f"{path}.scales" in tensors:
            # A group with a scale of zero, whose elements are not.
            tensors[f"{path}.scales"][..., 0, 0] = 0
            mx.eval(tensors)
    mx.save_safetensors(file, tensors)
    teacher = load(source).model
    settings = {"digest": "a", "top_k": 320, "logger": NullLogger()}
    training = cache_part_targets(folder / "t", parts_of(1, 6), teacher, **settings)
    held_out = cache_part_targets(folder / "h", parts_of(2, 3), teacher, **settings)
    return source, folder / "q", training, held_out


def tuner_of(case, folder, **changes):
    source, path, training, held_out = case
    return BlockScaleTuner(
        CONFIG.model_copy(update=changes),
        CandidateModel(load(path).model, mx.float16),
        training,
        held_out,
        dense=load(source).model,
        folder=folder / "state",
        seed=3,
        logger=RunLogger(None, quiet=True),
    )


@pytest.fixture(scope="module")
def tuned(case, tmp_path_factory):
    """A finished run, its initial divergences and its tensors."""
    tuner = tuner_of(case, tmp_path_factory.mktemp("tuned"))
    start = [tuner.model.divergence(targets) for targets in case[2:]]
    return tuner, start, tuner.run()


def test_tuning_reduces_the_divergence_and_keeps_elements(case, tuned):
    _, path, training, held_out = case
    before = dict(tree_flatten(load(path).model.parameters()))
    tuner, start, tensors = tuned
    # With a global scale, the scales of RTN are better.
    limit = 0.95 if any("global_scale" in name for name in before) else 0.8
    assert tuner.model.divergence(training) < limit * start[0]
    assert tuner.model.divergence(held_out) < start[1]
    after = dict(tree_flatten(tuner.model.model.parameters()))
    names = {
        k for k, v in before.items() if k.endswith("scales") and v.dtype == mx.uint8
    }
    assert tensors.keys() == names
    assert all(value.dtype == mx.uint8 for value in tensors.values())
    changed = {k for k, v in before.items() if not mx.array_equal(v, after[k])}
    assert changed <= names
    assert len(changed) > len(names) / 2
    for name in names:
        is_zero = before[name] == 0
        assert mx.array_equal(is_zero, tensors[name] == 0), name
        assert mx.all(tensors[name] <= E4M3Scales.MAX_CODE)


def test_training_uses_the_weights_that_are_stored(case, tuned):
    """The dense model predicts what the quantized one does, and no other."""
    tokens = case[3].tokens[0]
    tuner, _, tensors = tuned
    tuner._masters["scales"] = mx.log(
        mx.maximum(E4M3Scales.values(tuner._flat.flatten(tensors)["scales"]), 1e-9)
    )
    assert all(mx.array_equal(v, tensors[k]) for k, v in tuner._stored().items())
    logits = []
    tuner._value_and_grad(lambda: logits.append(tuner._dense(tokens)) or mx.array(0.0))
    served = tuner.model.model(tokens)
    assert mx.allclose(logits[0], served, rtol=1e-3, atol=1e-3)
    # Negative control.
    start = load(case[1]).model(tokens)
    assert not mx.allclose(start, served, rtol=1e-2, atol=1e-2)


def test_gradients_match_finite_differences(case, tmp_path, monkeypatch):
    """Without the rounding of scales, through which the gradient passes."""
    tuner = tuner_of(case, tmp_path)
    monkeypatch.setattr(
        tuner, "_rounded", lambda x: mx.where(tuner._is_zero, 0.0, mx.exp(x))
    )
    probe = mx.random.normal((2, 32, 320), key=mx.random.key(4))
    tokens, start = case[2].tokens[0], tuner._masters["scales"]

    def loss(step=0.0, place=0):
        tuner._masters["scales"] = start + step * (mx.arange(start.size) == place)
        return tuner._value_and_grad(lambda: (tuner._dense(tokens) * probe).mean())

    gradient = np.array(loss()[1]["scales"])
    for place in np.argsort(-np.abs(gradient))[:3].tolist():
        high, low = (loss(step, place)[0].item() for step in (0.004, -0.004))
        assert gradient[place] == pytest.approx((high - low) / 0.008, rel=0.05)
    assert (gradient[np.array(tuner._is_zero)] == 0).all()


def test_chunks_have_the_gradients_of_all_logits(case, tmp_path, monkeypatch):
    sums = []
    monkeypatch.setattr(candidates, "loss_chunk", lambda *_, **__: 7)
    for many in (candidates.MANY_LOGITS, 0):
        monkeypatch.setattr(candidates, "MANY_LOGITS", many)
        tuner = tuner_of(case, tmp_path)
        training = case[2]
        tuner._add(training.tokens[0], training.counted[0], *training[0])
        sums.append(tuner._sums)
    assert mx.abs(sums[0]["scales"]).max() > 0
    for name, value in sums[0].items():
        error = mx.abs(value - sums[1][name]).max()
        assert error < 1e-4 * mx.abs(value).max(), name


def test_killed_run_resumes_exactly(case, tmp_path, monkeypatch):
    expected = tuner_of(case, tmp_path / "expected", learning_rate=None).run()
    killed = tuner_of(case, tmp_path, learning_rate=None)
    evaluate, calls = killed._evaluate, []

    def interrupt():
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return evaluate()

    monkeypatch.setattr(killed, "_evaluate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    second = tuner_of(case, tmp_path, learning_rate=None)
    state = second._load()
    assert (state["step"], state["rate"]) == (8, LEARNING_RATE)
    tensors = second.run()
    assert all(mx.array_equal(v, tensors[k]) for k, v in expected.items())


def test_rounded_inputs_are_those_of_the_quantized_model(make_checkpoint, tmp_path):
    from test_ptq_methods import quantize

    source = make_checkpoint(LLAMA, num_hidden_layers=1)
    quantize("rtn", source, tmp_path / "q", mode="nvfp4")
    config = read_config(tmp_path / "q") | {"quantize_activations": True}
    write_atomic(tmp_path / "q/config.json", json.dumps(config))
    held_out = cache_part_targets(
        tmp_path / "h",
        parts_of(2, 1),
        load(source).model,
        digest="a",
        top_k=320,
        logger=NullLogger(),
    )
    tuner = tuner_of((source, tmp_path / "q", held_out, held_out), tmp_path)
    tokens, logits = held_out.tokens[0], []
    tuner._value_and_grad(lambda: logits.append(tuner._dense(tokens)) or mx.array(0.0))
    assert mx.allclose(logits[0], tuner.model.model(tokens), rtol=1e-3, atol=1e-3)
    exact = load(source).model(tokens)
    assert not mx.allclose(logits[0], exact, rtol=1e-2, atol=1e-2)


def test_modes_with_scale_tuning():
    for mode, has_tuning in {"nvfp4": True, "mxfp4": False, "mxfp8": False}.items():
        config = quantize_config.GPTQConfig(mode=mode, effort="best")
        assert (config.scale_tuning is not None) == has_tuning
        assert quantize_config.GPTQConfig(mode=mode).scale_tuning is None
