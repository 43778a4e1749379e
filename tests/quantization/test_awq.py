"""AWQ: nearer than rounding, block by block, and as mlx-lm runs it."""

from functools import partial
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from lmx.config import quantize
from lmx.config.quant_spec import QuantSpec
from lmx.config.quantize import AWQConfig, GPTQConfig, RTNConfig
from lmx.models import checkpoint_writer
from lmx.models.blockwise import BlockwiseModel
from lmx.models.loader import build_model, load
from lmx.quantization.packing import expand, pack
from lmx.quantization.ptq import awq
from lmx.quantization.ptq.awq import clipped, group_costs
from lmx.quantization.ptq.awq_scaling import (
    BlockError,
    find_mappings,
    rounded,
    search_scales,
)
from lmx.quantization.ptq.base import PTQContext
from lmx.quantization.ptq.methods import METHODS
from lmx.quantization.target_layers import select_layers
from mlx.utils import tree_flatten, tree_unflatten
from tiny_checkpoints import LLAMA, QWEN3_MOE
from tiny_windows import windows_of

SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
SPEC = QuantSpec(bits=3, group_size=32)


class Report(SimpleNamespace):
    def __init__(self):
        super().__init__(lines=[])
        self.info = self.warning = self.debug = self.lines.append


def model_of(config=LLAMA, **changes):
    """Some channels of every norm let far more through than others, as in real ones."""
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
    """Tensors, and the dense weights by name that the quantized model has."""
    model = model_of(config)
    settings = CONFIGS[method](**{"bits": 3, "group_size": 32} | settings)
    specs = select_layers(model, settings).specs
    dense = dict(tree_flatten(model.parameters()))
    logger = Report()
    windows = windows_of(tokens_of(1))
    task = PTQContext(model, specs, mx.float32, lambda *_: windows, folder, logger)
    tensors = METHODS[method](settings, task)
    found = dense | {k: v for k, v in tensors.items() if k in dense}
    for path, spec in specs.items():
        names = ("weight", "scales", "biases")
        packed = {name: tensors[f"{path}.{name}"] for name in names}
        found[f"{path}.weight"] = expand(packed, spec, mx.float32)
    return tensors, found, logger.lines


def block_errors(weights, config=LLAMA):
    """What every block by itself loses, on tokens that nothing was searched on."""
    model, other = model_of(config), model_of(config)
    other.update(tree_unflatten(list(weights.items())))
    tokens, errors = tokens_of(2), []
    ours, theirs = BlockwiseModel(model), BlockwiseModel(other)
    hidden = ours.first(tokens)
    for number in range(len(ours)):
        after = ours.run(number, tokens, hidden)
        off = theirs.run(number, tokens, hidden) - after
        errors.append(mx.square(off).sum().item() / mx.square(after).sum().item())
        hidden = after
    return errors


@pytest.mark.parametrize("config", [LLAMA, QWEN3_MOE], ids=["llama", "mixture"])
def test_no_block_loses_more_than_by_rounding(tmp_path, config):
    _, found, lines = quantized("awq", tmp_path / "awq", config)
    _, plain, _ = quantized("rtn", tmp_path / "rtn", config)
    mine, nearest = block_errors(found, config), block_errors(plain, config)
    assert all(a <= b for a, b in zip(mine, nearest, strict=True))
    assert sum(mine) < 0.9 * sum(nearest)
    assert any("scales folded into" in line and "of 2 blocks" in line for line in lines)


def test_norms_change_only_where_a_scale_was_folded(tmp_path):
    tensors, _, lines = quantized("awq", tmp_path)
    folded = {
        f"model.layers.{number}.{path}.weight"
        for number in range(2)
        for path in ("input_layernorm", "post_attention_layernorm")
        if any(f"layers.{number}:" in line and path in line for line in lines)
    }
    assert folded
    assert {name for name in tensors if "norm" in name} == folded


def test_mixed_bits_and_what_stock_mlx_lm_makes_of_it(make_checkpoint, tmp_path):
    source = make_checkpoint(dtype="float32", **SIZES)
    loaded = load(source, compute="stored")
    config = quantize.AWQConfig(bits=3, group_size=32)
    selection = select_layers(loaded.model, config)
    wide = {p: QuantSpec(bits=6, group_size=32) for p in selection.specs if "v_" in p}
    assert wide
    specs = selection.specs | wide
    dense = dict(tree_flatten(loaded.model.parameters()))
    windows = windows_of(tokens_of(1))
    task = PTQContext(
        loaded.model, specs, mx.float32, lambda *_: windows, tmp_path, Report()
    )
    tensors = METHODS["awq"](config, task)
    kept = {k: v for k, v in dense.items() if k.removesuffix(".weight") not in specs}
    target = tmp_path / "model"
    target.mkdir()
    checkpoint_writer.write_checkpoint(
        target,
        kept | tensors,
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
        kept[f"{path}.weight"] = expand(packed, spec, mx.float32)
    kept |= {
        name: value
        for name, value in tensors.items()
        if name in kept and "norm" in name
    }
    by_hand = load(source, compute="stored").model
    by_hand.update(tree_unflatten(list(kept.items())))
    ours = load(target, compute="stored").model
    tokens = tokens_of(3, count=1)
    assert mx.array_equal(ours(tokens[:, :1]), stock(tokens[:, :1]))
    assert mx.allclose(by_hand(tokens), stock(tokens), rtol=1e-4, atol=1e-4)


def test_awq_resumes_after_a_kill(tmp_path, monkeypatch):
    whole, _, _ = quantized("awq", tmp_path / "whole")
    assert any(name.endswith("layernorm.weight") for name in whole)
    solve = awq.AWQ.solve

    def stopping(self, weights, moments):
        if "model.layers.1.mlp.down_proj" in weights:
            raise KeyboardInterrupt
        return solve(self, weights, moments)

    with monkeypatch.context() as patched:
        patched.setattr(awq.AWQ, "solve", stopping)
        with pytest.raises(KeyboardInterrupt):
            quantized("awq", tmp_path / "killed")
    again, _, lines = quantized("awq", tmp_path / "killed")
    assert not any("layers.0:" in line for line in lines)
    assert whole.keys() == again.keys()
    assert all(mx.array_equal(again[name], value) for name, value in whole.items())


class Toy(nn.Module):
    """A norm and a layer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(128)
        self.layer = nn.Linear(128, 64, bias=False)

    def __call__(self, x):
        return self.layer(self.norm(x))


def test_channels_with_large_inputs_are_kept_exact():
    """A few channels carry most of the output: AWQ's case."""
    mx.random.seed(0)
    toy = Toy()
    outliers = mx.arange(128) % 32 == 5
    toy.norm.weight = mx.where(outliers, 30.0, 1.0)
    hidden = [mx.random.normal((1, 256, 128)) for _ in range(3)]
    before = dict(tree_flatten(toy.parameters()))
    folds = find_mappings(toy, partial(_added, toy), hidden[0])
    dtypes = {name: value.dtype for name, value in before.items()}

    def rounding(path, weight):
        return expand(pack(weight, SPEC, mx.float32), SPEC, mx.float32)

    trials = [BlockError.of(toy, partial(_added, toy), x) for x in hidden]
    found = search_scales(folds, before, ["layer"], rounding, *trials[:2], dtypes)
    plain, folded = (
        trials[2].error(rounded(weights, ["layer"], rounding))
        for weights in (before, found.weights)
    )
    assert folded < 0.3 * plain
    assert trials[2].error(found.weights) < 1e-10


def _added(toy, x):
    # As a block: what it makes is added to what it got.
    return mx.concatenate([x[..., :64] + toy(x), x[..., 64:]], axis=-1)


def test_clipping_loses_least_of_all_ranges_by_numpy():
    mx.random.seed(1)
    weight = mx.random.normal((6, 96)) ** 3
    x = np.random.default_rng(0).normal(size=(500, 96))
    costs = group_costs(mx.array(x.T @ x, dtype=mx.float32), 32)

    def error(tensors):
        off = np.array(expand(tensors, SPEC, mx.float32) - weight, np.float64)
        parts = [x[:, i : i + 32] @ off[:, i : i + 32].T for i in (0, 32, 64)]
        return np.stack([(part**2).sum(axis=0) for part in parts])

    mine, plain = (
        clipped(weight, costs, SPEC, mx.float32),
        pack(weight, SPEC, mx.float32),
    )
    assert (error(mine) <= error(plain) * (1 + 1e-6)).all()
    assert error(mine).sum() < 0.96 * error(plain).sum()
    for share in (0.9, 0.7, 0.5):
        groups = weight.reshape(6, 3, 32)
        low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
        inside = mx.clip(groups, share * low, share * high).reshape(6, 96)
        other = error(pack(inside, SPEC, mx.float32))
        assert (error(mine) <= other * (1 + 1e-6)).all()


def test_only_affine_grids():
    with pytest.raises(ValueError, match="affine"):
        quantize.AWQConfig(mode="mxfp4")
