"""Exponentials for MLX's CPU backend, whose own take 10 to 30 ns each.

Here they are 1 to 2 ns of sums and products, which the compiler makes vectors of, and
twenty times as exact: 2^n times a polynomial of Cephes on what is left, |r| < 0.35.
The steps are as long as what MLX fuses; `mx.contiguous` parts them without a copy.
"""

import math
from functools import partial

import mlx.core as mx

# Adding it rounds a float32 to a whole number n: 2^23 leaves no bits for less. The
# lowest bits of the sum are then those of n.
ROUNDER = 1.5 * 2**23
# log(2) in two parts; n times the first is exact.
LOG_2 = (0.693145751953125, 1.428606765330187e-06)
POLYNOMIAL = (
    *(1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3),
    *(4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1),
)
# The exponent of a float32 is the number in its bits from 23 on, less 127.
EXPONENT, BIAS = 23, 127
# As far as 2^n is a normal number, and as 2^-n goes by shifting one bit.
LOWEST, LOWEST_SHIFTED = -87.3, -42.9


def exp(x: mx.array) -> mx.array:
    """e^x of float32 numbers, within 1e-38 and 1e38; no gradient."""
    return _exp(mx.stop_gradient(x))


@mx.compile
def _exp(x: mx.array) -> mx.array:
    x = mx.where(x < LOWEST, LOWEST, x)
    x = mx.where(x > -LOWEST, -LOWEST, x)
    shifted = x / math.log(2) + ROUNDER
    bits = mx.left_shift(mx.view(shifted, mx.int32), EXPONENT)
    power = mx.view(bits + (BIAS << EXPONENT), mx.float32)
    return _series(_rest(x, shifted - ROUNDER)) * power


@partial(mx.compile, shapeless=True)
def _shapeless_exp(x: mx.array) -> mx.array:
    """`exp` of numbers not above zero, at least 2e-19: no bits of arrays whose
    shapes nobody knows can be looked at."""
    x = mx.stop_gradient(mx.maximum(x, LOWEST_SHIFTED))
    n = (x / math.log(2) + ROUNDER) - ROUNDER
    power = mx.left_shift(mx.array(1, mx.int64), (-n).astype(mx.int64))
    return _series(_rest(x, n)) / power.astype(mx.float32)


def _rest(x: mx.array, n: mx.array) -> mx.array:
    return mx.contiguous(x - n * LOG_2[0] - n * LOG_2[1])


def _series(x: mx.array) -> mx.array:
    """e^x of small numbers, in as few steps one after the other as it takes."""
    a, b, c, d, e, f = POLYNOMIAL
    square = x * x
    sum_ = ((a * x + b) * square + (c * x + d)) * square + (e * x + f)
    return sum_ * square + x + 1


@mx.custom_function
def _sigmoid(x: mx.array) -> mx.array:
    e = mx.contiguous(_exp(-x.astype(mx.float32)))
    return (1 / (1 + e)).astype(x.dtype)


@_sigmoid.vjp
def _(primal, cotangent, output):
    return cotangent * output * (1 - output)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """mlx-lm's function of this name: `silu(gate) * x`."""
    return gate * _sigmoid(gate) * x


def sigmoid(x: mx.array) -> mx.array:
    """1 / (1 + e^-x) in the type of `x`, which must be finite."""
    e = _shapeless_exp(-mx.abs(x.astype(mx.float32)))
    y = (mx.where(x >= 0, 1.0, e) / (1 + e)).astype(x.dtype)
    # Nothing is added but the gradient; shapeless functions can hold no custom one.
    return y + y * (1 - y) * (x - mx.stop_gradient(x))


def silu(x: mx.array) -> mx.array:
    """`nn.silu`."""
    return x * sigmoid(x)


def gelu_approx(x: mx.array) -> mx.array:
    """`nn.gelu_approx`: half of 1 + tanh(z) is the sigmoid of 2 z."""
    return x * sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))
