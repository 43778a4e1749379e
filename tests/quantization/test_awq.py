"""AWQ has a lower block error than RTN, and its checkpoint runs in stock mlx-lm."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from calibration_windows import windows_of
from lmx.config import quantize
from lmx.config.quant_spec import QuantSpec
from lmx.config.quantize import AWQConfig, GPTQConfig, RTNConfig
from lmx.models import checkpoint_writer
from lmx.models.blockwise import BlockwiseModel
from lmx.models.loader import build_model, load
from lmx.quantization.packing import dequantize, pack
from lmx.quantization.ptq import awq
from lmx.quantization.ptq.awq import clip, group_moments
from lmx.quantization.ptq.awq_scaling import (
    BlockError,
    quantized_weights,
    search_scales,
)
from lmx.quantization.ptq.base import PTQContext
from lmx.quantization.ptq.methods import METHODS
from lmx.quantization.ptq.scale_mappings import find_mappings
from lmx.quantization.target_layers import select_layers
from lmx.run.logger import NullLogger
from mlx.utils import tree_flatten, tree_unflatten
from tiny_checkpoints import LLAMA, QWEN3_MOE

SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
SPEC = QuantSpec(bits=3, group_size=32)


class RecordingLogger(NullLogger):
    def __init__(self):
        super().__init__()
        self.lines = []
        self.info = self.warning = self.debug = self.lines.append


def model_of(config=LLAMA, **changes):
    """Return a model whose norms have outlier channels, as in real models."""
    mx.random.seed(5)
    model = build_model(config | SIZES | changes)
    weights = dict(tree_flatten(model.parameters()))
    for number, (name, value) in enumerate(weights.items()):
        if value.ndim > 1:
            weights[name] = 2 * value
        elif value.shape == (64,):
            key = mx.random.key(number)
            weights[name] = value * mx.exp(mx.random.normal((64,), key=key))
    model.update(tree_unflatten(list(weights.items())))
    return model.eval()


CONFIGS = {"awq": AWQConfig, "gptq": GPTQConfig, "rtn": RTNConfig}


def tokens_of(seed, count=16):
    return mx.random.randint(0, 320, (count, 32), key=mx.random.key(seed))


def quantized(method, folder, config=LLAMA, **settings):
    """Return tensors, dense weights of the quantized model by name, and log lines."""
    model = model_of(config)
    settings = CONFIGS[method](**{"bits": 3, "group_size": 32} | settings)
    specs = select_layers(model, settings).specs
    dense = dict(tree_flatten(model.parameters()))
    logger = RecordingLogger()
    windows = windows_of(tokens_of(1))
    context = PTQContext(model, specs, mx.float32, lambda *_: windows, folder, logger)
    tensors = METHODS[method](settings, context).quantize()
    weights = dense | {k: v for k, v in tensors.items() if k in dense}
    for path, spec in specs.items():
        names = ("weight", "scales", "biases")
        packed = {name: tensors[f"{path}.{name}"] for name in names}
        weights[f"{path}.weight"] = dequantize(packed, spec, mx.float32)
    return tensors, weights, logger.lines


def block_errors(weights, config=LLAMA):
    """Return the relative error of each block, on new tokens."""
    model, quantized_model = model_of(config), model_of(config)
    quantized_model.update(tree_unflatten(list(weights.items())))
    tokens, errors = tokens_of(2), []
    original, quantized = BlockwiseModel(model), BlockwiseModel(quantized_model)
    hidden = original.embed(tokens)
    for index in range(len(original)):
        output = original.run_block(index, tokens, hidden)
        error = quantized.run_block(index, tokens, hidden) - output
        errors.append(mx.square(error).sum().item() / mx.square(output).sum().item())
        hidden = output
    return errors


@pytest.mark.parametrize("config", [LLAMA, QWEN3_MOE], ids=["llama", "mixture"])
def test_awq_block_error_is_at_most_that_of_rtn(tmp_path, config):
    _, weights, lines = quantized("awq", tmp_path / "awq", config)
    _, rtn_weights, _ = quantized("rtn", tmp_path / "rtn", config)
    awq_errors = block_errors(weights, config)
    rtn_errors = block_errors(rtn_weights, config)
    assert all(a <= b for a, b in zip(awq_errors, rtn_errors, strict=True))
    assert sum(awq_errors) < 0.9 * sum(rtn_errors)
    assert any("AWQ scales applied" in line and "in 2 blocks" in line for line in lines)


def test_norms_change_only_if_a_scale_was_applied(tmp_path):
    tensors, _, lines = quantized("awq", tmp_path)
    scaled = {
        f"model.layers.{number}.{path}.weight"
        for number in range(2)
        for path in ("input_layernorm", "post_attention_layernorm")
        if any(f"layers.{number}:" in line and path in line for line in lines)
    }
    assert scaled
    assert {name for name in tensors if "norm" in name} == scaled


def test_only_affine_layers_are_clipped(make_checkpoint, tmp_path, monkeypatch):
    loaded = load(make_checkpoint(dtype="float32", **SIZES), compute="stored")
    config = quantize.AWQConfig(bits=2, group_size=32)
    specs = select_layers(loaded.model, config).specs
    floating = QuantSpec(bits=4, group_size=32, mode="mxfp4")
    specs |= {path: floating for path in specs if path.endswith("down_proj")}
    windows = windows_of(tokens_of(1))
    context = PTQContext(
        loaded.model, specs, mx.float32, lambda *_: windows, tmp_path, RecordingLogger()
    )
    method = METHODS["awq"](config, context)
    choose, clipped = method._layers_to_clip, set()

    def recorded(*arguments):
        paths = choose(*arguments)
        clipped.update(paths)
        return paths

    monkeypatch.setattr(method, "_layers_to_clip", recorded)
    method.quantize()
    assert clipped
    assert {specs[path].mode for path in clipped} == {"affine"}


def test_mixed_bits_in_stock_mlx_lm(make_checkpoint, tmp_path):
    source = make_checkpoint(dtype="float32", **SIZES)
    loaded = load(source, compute="stored")
    config = quantize.AWQConfig(bits=3, group_size=32)
    plan = select_layers(loaded.model, config)
    wide = {p: QuantSpec(bits=6, group_size=32) for p in plan.specs if "v_" in p}
    assert wide
    specs = plan.specs | wide
    dense = dict(tree_flatten(loaded.model.parameters()))
    windows = windows_of(tokens_of(1))
    context = PTQContext(
        loaded.model, specs, mx.float32, lambda *_: windows, tmp_path, RecordingLogger()
    )
    tensors = METHODS["awq"](config, context).quantize()
    weights = {k: v for k, v in dense.items() if k.removesuffix(".weight") not in specs}
    target = tmp_path / "model"
    target.mkdir()
    checkpoint_writer.write_checkpoint(
        target,
        weights | tensors,
        loaded.config,
        companions=loaded.path,
        specs=specs,
        kept=[],
    )
    stock, _ = mlx_lm.load(str(target))
    assert stock.layers[0].self_attn.v_proj.bits == 6
    for path, spec in specs.items():
        names = ("weight", "scales", "biases")
        packed = {name: tensors[f"{path}.{name}"] for name in names}
        weights[f"{path}.weight"] = dequantize(packed, spec, mx.float32)
    weights |= {
        name: value
        for name, value in tensors.items()
        if name in weights and "norm" in name
    }
    reference = load(source, compute="stored").model
    reference.update(tree_unflatten(list(weights.items())))
    loaded_model = load(target, compute="stored").model
    tokens = tokens_of(3, count=1)
    assert mx.array_equal(loaded_model(tokens[:, :1]), stock(tokens[:, :1]))
    assert mx.allclose(reference(tokens), stock(tokens), rtol=1e-4, atol=1e-4)


def test_awq_resumes_after_a_kill(tmp_path, monkeypatch):
    expected, _, _ = quantized("awq", tmp_path / "expected")
    assert any(name.endswith("layernorm.weight") for name in expected)
    quantize_group = awq.AWQ.quantize_group

    def interrupt(self, weights, statistics):
        if "model.layers.1.mlp.down_proj" in weights:
            raise KeyboardInterrupt
        return quantize_group(self, weights, statistics)

    with monkeypatch.context() as patched:
        patched.setattr(awq.AWQ, "quantize_group", interrupt)
        with pytest.raises(KeyboardInterrupt):
            quantized("awq", tmp_path / "killed")
    resumed, _, lines = quantized("awq", tmp_path / "killed")
    assert not any("layers.0:" in line for line in lines)
    assert expected.keys() == resumed.keys()
    assert all(mx.array_equal(resumed[name], value) for name, value in expected.items())


class NormAndLinear(nn.Module):
    """A norm followed by a linear layer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(128)
        self.layer = nn.Linear(128, 64, bias=False)

    def __call__(self, x):
        return self.layer(self.norm(x))


def test_search_scales_protects_salient_channels():
    """A few channels carry most of the output."""
    mx.random.seed(0)
    module = NormAndLinear()
    outliers = mx.arange(128) % 32 == 5
    module.norm.weight = mx.where(outliers, 30.0, 1.0)
    hidden = [mx.random.normal((1, 256, 128)) for _ in range(3)]
    before = dict(tree_flatten(module.parameters()))
    mappings = find_mappings(module, partial(_residual, module), hidden[0])
    dtypes = {name: value.dtype for name, value in before.items()}

    def quantizer(path, weight):
        return dequantize(pack(weight, SPEC, mx.float32), SPEC, mx.float32)

    blocks = [BlockError.of(module, partial(_residual, module), x) for x in hidden]
    result = search_scales(mappings, before, ["layer"], quantizer, *blocks[:2], dtypes)
    rtn_error, scaled = (
        blocks[2].error(quantized_weights(weights, ["layer"], quantizer))
        for weights in (before, result.weights)
    )
    assert scaled < 0.3 * rtn_error
    assert blocks[2].error(result.weights) < 1e-10


def _residual(module, x):
    # Like a transformer block, the output is added to the input.
    return mx.concatenate([x[..., :64] + module(x), x[..., 64:]], axis=-1)


def test_clip_has_the_lowest_error_of_all_ranges():
    mx.random.seed(1)
    weight = mx.random.normal((6, 96)) ** 3
    x = np.random.default_rng(0).normal(size=(500, 96))
    moments = group_moments(mx.array(x.T @ x, dtype=mx.float32), 32)

    def error(tensors):
        errors = np.array(dequantize(tensors, SPEC, mx.float32) - weight, np.float64)
        parts = [x[:, i : i + 32] @ errors[:, i : i + 32].T for i in (0, 32, 64)]
        return np.stack([(part**2).sum(axis=0) for part in parts])

    clipped = clip(weight, moments, SPEC, mx.float32)
    rtn = pack(weight, SPEC, mx.float32)
    assert (error(clipped) <= error(rtn) * (1 + 1e-6)).all()
    assert error(clipped).sum() < 0.96 * error(rtn).sum()
    for factor in (0.9, 0.7, 0.5):
        groups = weight.reshape(6, 3, 32)
        low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
        candidate = mx.clip(groups, factor * low, factor * high).reshape(6, 96)
        candidate_error = error(pack(candidate, SPEC, mx.float32))
        assert (error(clipped) <= candidate_error * (1 + 1e-6)).all()


def test_awq_refuses_floating_point_modes():
    with pytest.raises(ValueError, match="affine"):
        quantize.AWQConfig(mode="mxfp4")
    budget = {"target_bpw": 4.5, "candidate_modes": ["nvfp4"]}
    with pytest.raises(ValueError, match="remove candidate_modes"):
        quantize.AWQConfig(mixed_precision=budget)
    assert quantize.GPTQConfig(mixed_precision=budget).mixed_precision
