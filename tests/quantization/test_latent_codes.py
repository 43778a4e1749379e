"""LatentCodes: stored tensors and gradients."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.quant_spec import QuantSpec
from lmx.quantization.packing import dequantize, pack
from lmx.quantization.ptq.block_reconstruction import LatentCodes

AFFINE = itertools.product((2, 3, 4, 5, 6, 8), (32, 64, 128))
SPECS = [QuantSpec(bits=bits, group_size=group) for bits, group in AFFINE]
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def normal(*shape, seed=0, scale=0.05):
    return scale * mx.random.normal(shape, key=mx.random.key(seed))


def flat(packed):
    names = ("scales", "biases")
    return [packed[name].astype(mx.float32).reshape(-1) for name in names]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_unchanged_latents_give_the_stored_tensors(spec, dtype):
    """The tensors are equal bit for bit, and the weight is the dequantized one."""
    packed = pack(normal(2, 3, 256), spec, dtype)
    grid = LatentCodes(spec, dtype)
    values = grid.init(packed), *flat(packed)
    repacked = grid.packed(*values)
    assert all(mx.array_equal(value, repacked[name]) for name, value in packed.items())
    weight = grid.weight(*values)
    assert mx.array_equal(weight, dequantize(packed, spec, dtype).astype(mx.float32))
    moved = grid.packed(values[0] + 0.6, *values[1:])
    assert not mx.array_equal(moved["weight"], packed["weight"])


@pytest.mark.parametrize("bits", [2, 3])
def test_gradients_match_finite_differences_of_the_clipped_line(bits):
    """The straight-through estimator keeps the rounding error constant."""
    grid = LatentCodes(QuantSpec(bits=bits, group_size=32), mx.float32)
    top = 2**bits - 1
    latents = top / 2 + normal(1, 32, scale=top / 2)
    scales, biases = mx.array([0.3]), mx.array([-0.4])
    cotangent = normal(1, 32, seed=1, scale=1.0)
    gradients = mx.grad(
        lambda *parts: (grid.weight(*parts) * cotangent).sum(), argnums=(0, 1, 2)
    )(latents, scales, biases)
    p, g = (np.array(v[0], dtype=np.float64) for v in (latents, cotangent))
    s, b = scales.item(), biases.item()
    rounding_error = np.clip(np.rint(p), 0, top) - np.clip(p, -0.5, top + 0.5)

    def surrogate(p, s, b):
        return ((np.clip(p, -0.5, top + 0.5) + rounding_error) * s + b) @ g

    step = 1e-6
    moves = step * np.eye(32)
    expected = [surrogate(p + m, s, b) - surrogate(p - m, s, b) for m in moves]
    assert_close(gradients[0][0], np.array(expected) / (2 * step))
    assert 0 < np.mean(np.array(expected) == 0) < 0.5
    by_scale = surrogate(p, s + step, b) - surrogate(p, s - step, b)
    by_bias = surrogate(p, s, b + step) - surrogate(p, s, b - step)
    assert_close(gradients[1], np.array([by_scale]) / (2 * step))
    assert_close(gradients[2], np.array([by_bias]) / (2 * step))


def assert_close(value, expected):
    np.testing.assert_allclose(np.array(value), expected, rtol=1e-4, atol=1e-5)
