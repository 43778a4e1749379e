"""Round-to-nearest on the block types of GGUF."""

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf_samples import awkward_weights
from lmx.config.quant_spec import GGUF_MODES, QuantSpec
from lmx.quantization.gguf_grid import FORMATS, round_to_nearest
from lmx.quantization.packing import dequantize, pack, packed_bytes

modes = pytest.mark.parametrize("mode", GGUF_MODES)


def block_weights(grid, form) -> np.ndarray:
    """The weights of blocks by the formula of their type, in float64."""
    steps, min_steps, scales, minima = (
        np.array(v).astype(np.float64)
        for v in (grid.steps, grid.min_steps, grid.scales, grid.minima)
    )
    steps, min_steps = (np.repeat(v, form.groups, axis=1) for v in (steps, min_steps))
    codes = np.array(grid.codes).reshape(*scales.shape, form.group) - form.middle
    weight = (steps * scales)[..., None] * codes - (min_steps * minima)[..., None]
    return weight.reshape(grid.codes.shape)


@modes
def test_weights_are_those_of_the_block_formula(mode):
    form, spec, weight = FORMATS[mode], QuantSpec(mode=mode), awkward_weights()
    grid = round_to_nearest(weight, form)
    for steps in (grid.steps, grid.min_steps):
        assert mx.array_equal(steps.astype(mx.float16).astype(mx.float32), steps)
    low, high = form.scales
    assert low <= grid.scales.min().item() <= grid.scales.max().item() <= high
    assert 0 <= grid.minima.min().item() <= grid.minima.max().item() <= max(0, high)
    assert 0 <= grid.codes.min().item() <= grid.codes.max().item() < form.levels
    served = dequantize(pack(weight, spec, mx.float16), spec, mx.float16)
    assert served.dtype == mx.float32
    expected = block_weights(grid, form)
    # Only the sum of a scale and a minimum is rounded.
    tolerance = 2.0**-24 if form.has_minimum else 0
    np.testing.assert_allclose(np.array(served), expected, rtol=tolerance, atol=1e-9)
    assert (served[0] == 0).all().item()
    assert (served[1, :256] == 0).all().item()


@modes
def test_nan_stays_in_its_block(mode):
    spec, weight = QuantSpec(mode=mode), awkward_weights()
    clean = dequantize(pack(weight, spec, mx.float32), spec, mx.float32)
    weight[20, 300] = float("nan")
    served = dequantize(pack(weight, spec, mx.float32), spec, mx.float32)
    size = FORMATS[mode].group * FORMATS[mode].groups
    start = 300 // size * size
    assert mx.isnan(served[20, 300]).item()
    served[20, start : start + size] = clean[20, start : start + size]
    assert mx.array_equal(served, clean)


@pytest.mark.parametrize("mode", ["q4_0", "q5_0", "q8_0"])
def test_rtn_is_as_good_as_that_of_the_gguf_package(mode):
    spec = QuantSpec(mode=mode)
    weight = mx.random.normal((64, 512), key=mx.random.key(1))
    kind = gguf.GGMLQuantizationType[mode.upper()]
    theirs = gguf.quants.quantize(np.array(weight), kind)
    theirs = mx.array(gguf.quants.dequantize(theirs, kind))
    ours = dequantize(pack(weight, spec, mx.float32), spec, mx.float32)
    errors = [((w - weight) ** 2).sum().item() for w in (ours, theirs)]
    assert errors[0] <= 1.02 * errors[1]


@modes
def test_experts_are_quantized_one_by_one(mode):
    spec = QuantSpec(mode=mode)
    weight = mx.random.normal((3, 5, 256), key=mx.random.key(2))
    together = dequantize(pack(weight, spec, mx.float32), spec, mx.float32)
    single = dequantize(pack(weight[1], spec, mx.float32), spec, mx.float32)
    assert mx.array_equal(together[1], single)


@modes
def test_stored_size(mode):
    spec, weight = QuantSpec(mode=mode), mx.ones((4, 512))
    size = sum(value.nbytes for value in pack(weight, spec, mx.float16).values())
    assert size == packed_bytes(weight.size, spec, mx.float16)
    width = spec.bits + spec.scale_bits / spec.group_size
    if spec.stored is None:
        # Sixteen integer scales and a step for 256 weights.
        width = 32 + (16 * 8 + 16) / 256
    assert size * 8 == width * weight.size


def test_k_blocks_give_way_in_narrow_layers():
    assert QuantSpec(mode="q4_k").for_width(512) == QuantSpec(mode="q4_k")
    assert QuantSpec(mode="q4_k").for_width(384) == QuantSpec(mode="q5_0")
    assert QuantSpec(mode="q6_k").for_width(576) == QuantSpec(mode="q8_0")
    assert QuantSpec(mode="q4_0").for_width(384) == QuantSpec(mode="q4_0")
    assert not QuantSpec(mode="q3_k").for_width(48).fits(48)
    affine = QuantSpec(bits=4, group_size=64)
    assert affine.for_width(96) == affine
