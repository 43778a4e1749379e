"""Weights on GGUF's grids become its blocks, and the gguf package reads them."""

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf_samples import awkward_weights
from lmx.config.quant_spec import GGUF_MODES, QuantSpec
from lmx.convert.gguf import blocks, k_blocks
from lmx.quantization.gguf_grid import FORMATS
from lmx.quantization.packing import dequantize, pack

modes = pytest.mark.parametrize("mode", GGUF_MODES)


def encoded(tensors, spec):
    if spec.stored is None:
        return blocks.from_dense(tensors["weight"])
    return blocks.from_affine_groups(tensors, spec.bits, spec.group_size)


def decoded(kind, raw):
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])


@modes
@pytest.mark.parametrize("size", [0.02, 1e-3, 30.0])
def test_blocks_are_read_by_the_gguf_package_without_rounding(mode, size):
    spec = QuantSpec(mode=mode)
    tensors = pack(size / 0.02 * awkward_weights(seed=1), spec, mx.float16)
    served = np.array(dequantize(tensors, spec, mx.float16))
    kind, raw = encoded(tensors, spec)
    assert kind == mode.upper()
    assert np.array_equal(decoded(kind, raw), served)
    assert np.ptp(served) > size


@pytest.mark.parametrize("mode", ["q3_k", "q6_k"])
@pytest.mark.parametrize("common", [1, 3, 4, 7])
def test_common_divisors_of_scales_and_codes(mode, common):
    """Scales and codes may share a divisor, so that the step is not the greatest."""
    form, rng = FORMATS[mode], np.random.default_rng(common)
    steps = rng.uniform(1e-4, 1e-3, 40).astype(np.float16).astype(np.float64)
    low, high = form.scales
    scales = rng.integers(-(-low // common), high // common + 1, (40, 16)) * common
    limit = int(form.middle) // min(common, 2)
    codes = rng.integers(-limit, limit, (40, 16, 16)) * min(common, 2)
    values = (steps[:, None, None] * scales[..., None] * codes).astype(np.float32)
    kind, raw = k_blocks.from_weights(values.reshape(8, -1))
    assert np.array_equal(decoded(kind, raw), values.reshape(8, -1))


@modes
def test_weights_beside_the_grid_are_no_blocks(mode):
    spec = QuantSpec(mode=mode)
    tensors = pack(awkward_weights(seed=2), spec, mx.float16)
    name = "weight" if spec.stored is None else "scales"
    changed = mx.array(tensors[name])
    # One unit in the last place of one value.
    changed[20, 1] = (changed[20, 1].view(mx.uint32) + 1).view(mx.float32)
    result = encoded(tensors | {name: changed}, spec)
    assert result is None or result[0] in ("F16", "F32")
    assert encoded(tensors, spec)[0] == mode.upper()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_no_blocks(bad):
    values = np.zeros((2, 256), np.float32)
    assert k_blocks.from_weights(values)[0] == "Q3_K"
    values[1, 7] = bad
    assert k_blocks.from_weights(values) is None


def test_dense_weights_are_no_blocks():
    values = np.random.default_rng(0).normal(size=(4, 512)).astype(np.float32)
    assert k_blocks.from_weights(values) is None
    assert k_blocks.from_weights(values[:, :96]) is None
