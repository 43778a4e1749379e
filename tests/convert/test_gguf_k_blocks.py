"""Weights on GGUF's grids become its blocks, and the gguf package reads them."""

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf_samples import awkward_weights
from lmx.config.quant_spec import GGUF_MODES, QuantSpec
from lmx.convert.gguf import blocks, k_blocks
from lmx.convert.gguf.reader import GGUFTensor
from lmx.models import gguf_scales
from lmx.quantization.packing import dequantize, pack

modes = pytest.mark.parametrize("mode", GGUF_MODES)


def factors_of(tensors):
    stored = {f"layer.{name}": value for name, value in tensors.items()}
    return k_blocks.layer_factors(stored, "layer", tensors["weight"].shape)


def encoded(tensors, spec):
    if spec.stored is None:
        return blocks.from_dense(tensors["weight"], factors_of(tensors))
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
def test_blocks_keep_their_factors(mode):
    """The import of a file stores what the quantization stored."""
    tensors = pack(awkward_weights(seed=3), QuantSpec(mode=mode), mx.float16)
    kind, raw = encoded(tensors, QuantSpec(mode=mode))
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    shape = tensors["weight"].shape
    tensor = GGUFTensor(kind, shape, raw.reshape(shape[0], -1, size))
    factors = k_blocks.stored_factors(tensor)
    for name in (gguf_scales.STEPS, gguf_scales.SCALES):
        assert np.array_equal(factors[name], np.array(tensors[name])), name
    assert k_blocks.layer_factors(tensors, "layer", shape) is None


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
    values, steps, scales = (np.ones((2, n), np.float32) for n in (256, 1, 16))
    assert k_blocks.from_factors(values, steps, scales)[0] == "Q3_K"
    values[1, 7] = bad
    assert k_blocks.from_factors(values, steps, scales) is None
    assert k_blocks.factors(values, (0, 63)) is None


def test_dense_weights_are_no_blocks():
    tensors = pack(awkward_weights(seed=4), QuantSpec(mode="q6_k"), mx.float16)
    dense = awkward_weights(seed=5)
    factors = factors_of(tensors)
    assert blocks.from_dense(tensors["weight"], factors)[0] == "Q6_K"
    assert blocks.from_dense(tensors["weight"])[0] == "F16"
    assert blocks.from_dense(dense, factors)[0] == "F16"
    assert factors_of(tensors | {"weight": dense[:, :256]}) is None
