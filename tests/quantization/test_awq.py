"""AWQ's scales and ranges have the least error, and move nothing but rounding."""

from dataclasses import replace
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from lmx.config.quant_spec import K_BLOCK, QuantSpec
from lmx.config.quantize import AWQConfig
from lmx.interfaces import Communicator, Logger
from lmx.models.hooks import capture_inputs
from lmx.models.loader import build_model
from lmx.quantization.ptq.channel_scales import channel_scales
from lmx.quantization.ptq.channel_scales.channel_scales import (
    POWERS,
    AWQScales,
    ChannelScales,
    _BlockFinder,
    find_scales,
)
from lmx.quantization.ptq.channel_scales.scale_mappings import ScaleMapping
from lmx.quantization.ptq.gptq.clipping import CLIPS, clip_rows, round_rows
from lmx.quantization.ptq.hessian import damped
from lmx.quantization.ptq.methods import METHODS
from lmx.quantization.target_layers import select_layers
from mlx.utils import tree_flatten
from quantization_samples import (
    context_of,
    correlated_inputs,
    normal,
    to_float64,
    windows_of,
)
from tiny_families import VOCABULARY, changed, config

TOKENS = mx.random.randint(0, VOCABULARY, (6, 16), key=mx.random.key(1))
OTHERS = mx.random.randint(0, VOCABULARY, (2, 16), key=mx.random.key(2))
# Widths that a group of 32 divides.
WIDE = {"intermediate_size": 64, "q_lora_rank": 32, "kv_lora_rank": 64}
WIDE |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
WIDE |= {"qk_nope_head_dim": 32, "v_head_dim": 96}
CONFIG = AWQConfig(bits=3, group_size=32)


def enlarged(family):
    """A model with a few large input channels, as real ones have."""
    mx.random.seed(1)
    model = build_model(changed(config(family), WIDE)).eval()
    for name, value in tree_flatten(model.parameters()):
        if "norm" in name:
            value[::7] *= 8
    return model


def task(family, folder, settings=CONFIG, **options):
    model = enlarged(family)
    specs = select_layers(model, settings).specs
    options |= {"reread": partial(enlarged, family)}
    return context_of(model, specs, windows_of(TOKENS), folder, **options)


def scales_of(context) -> ChannelScales:
    return find_scales(context, AWQScales(context), CONFIG)


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 64, bias=False)
        self.second = nn.Linear(64, 48, bias=False)
        self.first.weight = normal(64, 32, seed=1, scale=1.0)
        self.first.weight[::9] *= 12
        self.second.weight = normal(48, 64, seed=2, scale=1.0)

    def __call__(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize("spec", [{"bits": 3, "group_size": 32}, {"mode": "nvfp4"}])
def test_scale_is_that_of_a_float64_reference(tmp_path, monkeypatch, spec):
    """Rounding is RTN here: fitted grids follow the large channels on their own."""
    spec = QuantSpec(**spec)
    round_nearest = lambda weight, _, spec, dtype: round_rows(weight, spec, dtype)  # noqa: E731
    monkeypatch.setattr(channel_scales, "fitted_rows", round_nearest)
    module, x = TwoLayers(), normal(4, 16, 32, seed=3, scale=1.0)
    first, second = module.first.weight, module.second.weight
    hidden = to_float64(module.first(x)).reshape(-1, 64)
    means = np.abs(hidden).mean(axis=0)
    context = context_of(module, {}, None, tmp_path)
    shards = [(TOKENS[:4], mx.ones((4, 16), mx.bool_))]
    finder = _BlockFinder(None, context, None, shards)
    run = lambda _, x: module(x)  # noqa: E731
    scale = AWQScales(context).scale(
        ScaleMapping("first", ("second",), 64),
        {"first.weight": first, "second.weight": second},
        {"first": spec, "second": spec},
        {"second": mx.array(means)},
        partial(finder._error, module, run, [x], [module(x)]),
    )

    def rounded(weight: np.ndarray) -> np.ndarray:
        return to_float64(round_rows(mx.array(weight), spec, mx.float32).weight())

    errors = {}
    for power in POWERS:
        candidate = means**power / np.exp(np.log(means).mean() * power)
        layers = to_float64(first) / candidate[:, None], to_float64(second) * candidate
        outputs = to_float64(x).reshape(-1, 32)
        for layer in layers:
            outputs = outputs @ rounded(layer).T
        expected = hidden @ to_float64(second).T
        errors[power] = ((outputs - expected) ** 2).sum(), candidate
    error, candidate = min(errors.values(), key=lambda pair: pair[0])
    assert np.allclose(scale, candidate, rtol=1e-5)
    assert 0 < max(errors, key=lambda p: -errors[p][0]) < POWERS[-1]
    assert error < 0.8 * errors[0][0]


MODES = [
    *({"bits": bits, "group_size": 32} for bits in (2, 3, 4, 6, 8)),
    *({"mode": mode} for mode in ("mxfp4", "nvfp4", "mxfp8")),
    *({"mode": mode} for mode in ("q4_0", "q4_k", "q6_k")),
]


def name_of(spec: dict) -> str:
    return "-".join(map(str, spec.values()))


@pytest.mark.parametrize("spec", MODES, ids=name_of)
def test_ranges_have_the_least_error_of_their_groups(spec):
    spec, weight = QuantSpec(**spec), normal(24, 256, seed=4)
    weight[:, ::37] *= 4
    x = correlated_inputs(256)
    hessian = damped(mx.array(x.T @ x, mx.float32), spec.group_size, 0.01)
    best = clip_rows(weight, weight, hessian, spec, mx.float32)
    matrix = to_float64(hessian.matrix)
    # The groups of a K block share its steps.
    size = K_BLOCK if spec.mode.endswith("_k") else spec.group_size

    def errors(grid) -> np.ndarray:
        changes = to_float64(grid.weight()) - to_float64(weight)
        parts = changes.reshape(24, -1, size)
        blocks = np.stack(
            [matrix[s : s + size, s : s + size] for s in range(0, 256, size)]
        )
        return np.einsum("ngi,gij,ngj->ng", parts, blocks, parts)

    found, rtn = errors(best.grid), errors(round_rows(weight, spec, mx.float32))
    groups = weight.reshape(24, -1, spec.group_size)
    largest = mx.abs(groups).max(axis=-1, keepdims=True)
    least = rtn
    for share in CLIPS:
        clipped = mx.clip(groups, -share * largest, share * largest)
        clipped = clipped.reshape(weight.shape)
        least = np.minimum(least, errors(round_rows(clipped, spec, mx.float32)))
    # Rows whose sum over all groups is less with RTN keep it.
    is_rtn = np.isclose(found, rtn, rtol=1e-4).all(axis=1)
    assert (found[~is_rtn] <= least[~is_rtn] * (1 + 1e-4)).all()
    # With 8 bits there is little to clip.
    assert spec.bits == 8 or is_rtn.mean() < 0.5
    changes = [
        to_float64(grid.weight()) - to_float64(weight)
        for grid in (best.grid, round_rows(weight, spec, mx.float32))
    ]
    rows = [np.einsum("ni,ij,nj->n", c, matrix, c) for c in changes]
    assert (rows[0] <= rows[1] * (1 + 1e-4)).all()
    assert rows[0].sum() < (0.97 if spec.bits < 8 else 1) * rows[1].sum()


FAMILIES = {
    **{"llama": 8, "gemma": 8, "qwen3_moe": 8, "qwen2_moe": 10, "phi3": 8},
    **{"olmo2": 4, "deepseek_v3": 9},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_scaled_model_computes_the_same(tmp_path, family):
    context = task(family, tmp_path)
    scales = scales_of(context)
    assert len(scales.places) == FAMILIES[family]
    assert any((scale.max() > 1.1 * scale.min()).item() for _, scale in scales.places)
    expected, scaled = context.model(OTHERS), scales.context(context).model
    assert mx.abs(scaled(OTHERS) - expected).max() <= 1e-5 * mx.abs(expected).max()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_error_of_a_block_never_rises(tmp_path, family, monkeypatch):
    errors, measure = [], _BlockFinder._error

    def recorded(*arguments) -> float:
        errors.append(measure(*arguments))
        return errors[-1]

    monkeypatch.setattr(_BlockFinder, "_error", recorded)
    context = task(family, tmp_path)
    scales_of(context)
    by_place = np.array(errors).reshape(2, -1, len(POWERS))
    for block in by_place:
        # The next place starts from the best scales so far.
        assert np.allclose(block[1:, 0], block[:-1].min(axis=1), rtol=1e-4)
        assert block[-1].min() < 0.98 * block[0, 0]


def test_experts_have_their_own_scales(tmp_path):
    context = task("qwen3_moe", tmp_path)
    scales = scales_of(context)
    path = "model.layers.0.mlp.switch_mlp.down_proj"
    by_consumer = {mapping.consumers: scale for mapping, scale in scales.places}
    scale, model = np.array(by_consumer[path,]), context.model
    with capture_inputs(model, [path]) as captured:
        mx.eval(model(TOKENS))
    rows, experts = np.array(captured.rows[path]), np.array(captured.experts[path])
    assert scale.shape == (4, rows.shape[1])
    for expert in range(4):
        means = np.log(np.abs(rows[experts == expert]).mean(axis=0))
        power = np.log(scale[expert]) @ (means - means.mean())
        power /= np.square(means - means.mean()).sum()
        assert min(abs(power - p) for p in POWERS) < 1e-3


def test_padding_does_not_count(tmp_path):
    lengths = np.array([[3], [16], [9], [12], [5], [16]])
    counted = np.arange(TOKENS.shape[1]) < lengths
    found = []
    for padding in (0, 7):
        tokens = np.where(counted, np.array(TOKENS), padding)
        context = task("qwen3_moe", tmp_path / str(padding))
        windows = windows_of(tokens, counted)
        context = replace(context, windows=lambda _, windows=windows: windows)
        found.append(scales_of(context).places)
    assert any(mapping.experts for mapping, _ in found[0])
    for (place, scale), (other, same) in zip(*found, strict=True):
        assert place == other
        np.testing.assert_allclose(scale, same, rtol=1e-5)


def test_search_goes_on_where_a_run_stopped(tmp_path, monkeypatch):
    context = task("llama", tmp_path)
    expected = scales_of(task("llama", tmp_path / "whole"))
    search, searched = _BlockFinder.run, []

    def stopped(self, index, hidden, *, searches: bool):
        searched.append((index, searches))
        if len(searched) == 2:
            raise KeyboardInterrupt
        return original(self, index, hidden, searches=searches)

    original = search
    monkeypatch.setattr(_BlockFinder, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        scales_of(context)
    found = scales_of(context)
    assert searched == [(0, True), (1, True), (0, False), (1, True)]
    for (mapping, scale), (other, other_scale) in zip(
        found.places, expected.places, strict=True
    ):
        assert mapping == other
        assert mx.array_equal(scale, other_scale)
    scales_of(context)
    assert len(searched) == 4


def test_processes_divide_the_powers(tmp_path):
    """Every process measures some, and all choose among all."""
    measured = []

    class Half(Communicator):
        def divide(self, items, work):
            items = list(items)
            parts = [list(work(items[rank::2])) for rank in range(2)]
            measured.extend(map(len, parts))
            return [parts[i % 2][i // 2] for i in range(len(items))]

    contexts = [
        task("llama", tmp_path / "one"),
        task("llama", tmp_path / "two", ranks=Half()),
    ]
    one, two = (scales_of(c).places for c in contexts)
    assert set(measured) == {len(POWERS) // 2}
    assert all(mx.array_equal(a, b) for (_, a), (_, b) in zip(one, two, strict=True))


@pytest.mark.parametrize("rounding", ["rtn", "gptq"])
def test_quantized_model_is_nearer_than_rtn(tmp_path, rounding):
    lines, settings = [], AWQConfig(bits=3, group_size=32, rounding=rounding)
    context = task("llama", tmp_path, settings, logger=logger_of(lines))
    expected, errors = context.model(TOKENS), []
    for method in ("rtn", "awq"):
        tensors = METHODS[method](settings, context).quantize()
        model = enlarged("llama")
        nn.quantize(model, 32, 3, class_predicate=lambda p, _: p in context.specs)
        model.load_weights(list(tensors.items()), strict=False)
        errors.append(mx.square(model(TOKENS) - expected).sum().item())
    assert errors[1] < 0.6 * errors[0]
    names = "lm_head, model.embed_tokens"
    assert f"rounded without scales: {names}" in lines


def logger_of(lines) -> Logger:
    logger = Logger()
    logger.info = lines.append
    return logger


def test_rounding_of_an_interrupted_run_has_its_own_folder(tmp_path):
    """Clipping and GPTQ of the same tokens are different results."""
    codes = []
    for rounding in ("rtn", "gptq", "rtn"):
        settings = AWQConfig(bits=3, group_size=32, rounding=rounding)
        context = task("llama", tmp_path, settings)
        codes.append(METHODS["awq"](settings, context).quantize())
    name = "model.layers.1.mlp.down_proj.weight"
    assert mx.array_equal(codes[0][name], codes[2][name])
    assert not mx.array_equal(codes[0][name], codes[1][name])
