"""Quantization grids compared with float64 NumPy."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.quant_spec import QuantSpec
from lmx.quantization.bit_packing import unpack_codes
from lmx.quantization.packing import dequantize, pack
from pydantic import ValidationError

AFFINE = [*zip((2, 3, 4, 5, 6, 8), 2 * (32, 64, 128), strict=True)]
ROWS, WIDTH = 24, 384


def weights(dtype):
    """Return rows of different scales and offsets, a zero row and a constant row."""
    key, scale_key = mx.random.split(mx.random.key(0))
    weight = mx.random.normal((ROWS, WIDTH), key=key)
    scale_values = mx.exp(2 * mx.random.normal((ROWS, 1), key=scale_key))
    weight = weight * scale_values + mx.linspace(-2, 2, ROWS)[:, None] * scale_values
    weight[0] = 0
    weight[1] = 0.75
    return weight.astype(dtype)


def affine(weight, bits, group_size):
    """Return exact codes, scales and biases. The larger edge and zero are levels."""
    groups = weight.reshape(-1, group_size)
    low, high = groups.min(axis=1), groups.max(axis=1)
    step = np.maximum((high - low) / (2**bits - 1), 1e-7)
    edge = np.where(abs(low) > abs(high), low, high)
    step = np.where(abs(low) > abs(high), step, -step)
    steps = np.round(edge / step)
    scale = np.where(steps == 0, step, edge / np.where(steps == 0, 1, steps))
    bias = np.where(steps == 0, 0, edge)
    codes = (groups - bias[:, None]) / scale[:, None]
    return codes.clip(0, 2**bits - 1), scale, bias


@pytest.mark.parametrize(("bits", "group_size"), AFFINE)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_affine_grid_is_anchored_at_the_larger_edge(bits, group_size, dtype):
    weight, spec = weights(dtype), QuantSpec(bits=bits, group_size=group_size)
    packed = pack(weight, spec, dtype)
    assert packed["scales"].dtype == packed["biases"].dtype == dtype
    exact = np.array(weight.astype(mx.float32), dtype=np.float64)
    codes, scale, bias = affine(exact, bits, group_size)
    stored_codes = np.array(unpack_codes(packed["weight"], bits)).reshape(codes.shape)
    scales, biases = (
        np.array(packed[name].astype(mx.float32)).reshape(-1)
        for name in ("scales", "biases")
    )
    precision = {mx.float32: 1e-6, mx.bfloat16: 2**-8}[dtype]
    matches = np.isclose(scales, scale, rtol=precision, atol=1e-7)
    # In 16 bits, MLX can differ by one step at the edge.
    assert matches.all() if dtype == mx.float32 else matches.mean() > 0.95
    assert abs(stored_codes[matches] - codes[matches]).max() <= 0.5 + 1e-3
    np.testing.assert_allclose(biases, bias, rtol=precision)
    rounded = stored_codes * scales[:, None].astype(np.float64) + biases[:, None]
    expanded = np.array(dequantize(packed, spec, dtype).astype(mx.float32))
    np.testing.assert_allclose(
        expanded.reshape(rounded.shape),
        rounded,
        rtol=2 * precision,
        atol=2 * precision * abs(exact).max(),
    )


def test_weight_is_cast_to_the_stored_dtype_first():
    weight, spec = weights(mx.float32), QuantSpec(bits=8, group_size=32)
    cast = pack(weight.astype(mx.bfloat16), spec, mx.bfloat16)
    packed = pack(weight, spec, mx.bfloat16)
    assert all(mx.array_equal(packed[name], cast[name]) for name in cast)
    float32_codes = pack(weight, spec, mx.float32)["weight"]
    assert not mx.array_equal(packed["weight"], float32_codes)


def test_mode_defaults():
    grids = {m: QuantSpec(mode=m) for m in ("affine", "mxfp4", "nvfp4", "mxfp8")}
    defaults = {m: (g.group_size, g.bits) for m, g in grids.items()}
    assert defaults == {
        "affine": (64, 4),
        "mxfp4": (32, 4),
        "nvfp4": (16, 4),
        "mxfp8": (32, 8),
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"bits": 7},
        {"bits": 1},
        {"bits": "4"},
        {"group_size": 48},
        {"group_size": 16},
        {"mode": "mxfp4", "bits": 8},
        {"mode": "nvfp4", "group_size": 32},
        {"mode": "fp4"},
        {"bit": 4},
    ],
)
def test_invalid_specs_are_refused(fields):
    with pytest.raises(ValidationError):
        QuantSpec(**fields)


def test_fits_checks_the_group_size():
    assert QuantSpec(group_size=64).fits(192)
    assert not QuantSpec(group_size=64).fits(172)
