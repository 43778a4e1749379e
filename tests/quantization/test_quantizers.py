"""QAT quantizers compared with NumPy, and their stored tensors."""

import itertools
import typing

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.qat import QATConfig
from lmx.config.quant_spec import QuantSpec
from lmx.errors import UserError
from lmx.quantization.bit_packing import unpack_codes
from lmx.quantization.packing import dequantize, pack
from lmx.quantization.qat.quantizers import (
    QUANTIZERS,
    FixedScaleQuantizer,
    LSQQuantizer,
    MinMaxQuantizer,
    TernaryQuantizer,
)
from pydantic import ValidationError
from quantization_samples import normal, to_float64

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
SPECS = [
    QuantSpec(bits=bits, group_size=group)
    for bits, group in zip((2, 3, 4, 5, 6, 8), 2 * (32, 64, 128), strict=True)
]
TWO_BITS = QuantSpec(bits=2, group_size=32)
KINDS = [
    *itertools.product((MinMaxQuantizer, LSQQuantizer, FixedScaleQuantizer), SPECS),
    *((TernaryQuantizer, QuantSpec(bits=2, group_size=size)) for size in (32, 128)),
]


def moved_quantizer(quantizer_class, spec, dtype, weight):
    """Return a quantizer and qparams that differ from their initial values."""
    quantizer = quantizer_class(spec, dtype)
    first = quantizer.init(weight)
    return quantizer, {
        name: value * (1 + 0.1 * mx.random.normal(value.shape, key=mx.random.key(i)))
        for i, (name, value) in enumerate(first.items())
    }


def test_ternary_scales_begin_with_the_least_squared_error():
    """Beside all scales, by brute force."""
    weight = normal(8, 64)
    weight[0, :32], weight[1, :31] = 0, 1e-6
    (scales,) = TernaryQuantizer(TWO_BITS, mx.float32).init(weight).values()
    groups = np.abs(np.array(weight, np.float64).reshape(-1, 32))
    candidates = np.linspace(0, 1, 2001)[None, :, None] * groups.max(-1)[:, None, None]
    used = groups[:, None] > candidates / 2
    errors = ((groups[:, None] - used * candidates) ** 2).sum(axis=-1)
    best, scales = errors.min(axis=-1), to_float64(scales)[:, None]
    found = ((groups - (groups > scales / 2) * scales) ** 2).sum(axis=-1)
    assert found.sum() < 1.02 * best.sum()
    # BitNet's scale, the mean magnitude, has a larger error.
    means = groups.mean(axis=-1, keepdims=True)
    bitnet = ((groups - (groups > means / 2) * means) ** 2).sum()
    assert found.sum() < 0.8 * bitnet


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ternary_training_continues_from_ternary_codes_alone(dtype):
    weight = normal(64, 128)
    # Groups with no and with one other weight than 0.
    weight[0, :32], weight[1, :31] = 0, 1e-6
    quantizer = TernaryQuantizer(TWO_BITS, dtype)
    packed = quantizer.pack(weight, quantizer.init(weight))
    assert mx.array_equal(packed["biases"], -packed["scales"])
    assert {*unpack_codes(packed["weight"], 2).flatten().tolist()} == {0, 1, 2}
    qparams = quantizer.init_from_codes(packed)
    first, second = (
        quantizer.latent_within_cell(packed, mx.random.key(seed)) for seed in (0, 1)
    )
    assert (first != second).mean().item() > 0.9
    for latent in (first, second):
        stored = quantizer.pack(latent, qparams)
        assert all(mx.array_equal(stored[name], packed[name]) for name in packed)
    with pytest.raises(UserError, match="are not ternary"):
        quantizer.init_from_codes(pack(weight, TWO_BITS, dtype))


def test_ternary_gradients_match_the_paper():
    """Of the scale too, which the bias follows."""
    weight, probe = normal(5, 96), normal(5, 96, seed=1, scale=1.0)
    spec = TWO_BITS
    quantizer, qparams = moved_quantizer(TernaryQuantizer, spec, mx.float32, weight)

    def loss(weight, qparams):
        return (quantizer.fake_quantize(weight, qparams) * probe).sum()

    d_weight, d_qparams = mx.grad(loss, argnums=(0, 1))(weight, qparams)
    scales, g = to_float64(qparams["scales"]), to_float64(probe).reshape(-1, 32)
    levels, inside, d_level = reference(
        to_float64(weight), scales, -scales, 32, top=2, margin=0.5
    )
    value = to_float64(quantizer.fake_quantize(weight, qparams))
    np.testing.assert_allclose(value.reshape(-1, 32), levels, atol=1e-6)
    assert 0 < inside.mean() < 1
    np.testing.assert_allclose(to_float64(d_weight).reshape(-1, 32), g * inside)
    # The level s (code - 1) has the derivative code - 1 beyond the range.
    expected = (g * np.where(inside, d_level, d_level - 1)).sum(axis=-1) / 8
    np.testing.assert_allclose(to_float64(d_qparams["scales"]), expected, rtol=2e-4)


def test_config_lists_all_quantizers():
    choices, _ = typing.get_args(QATConfig.model_fields["quantizer"].annotation)
    assert set(typing.get_args(choices)) == set(QUANTIZERS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("quantizer_class", "spec"),
    KINDS,
    ids=lambda v: getattr(v, "__name__", str(v))[-60:],
)
def test_fake_quantize_equals_the_dequantized_pack(quantizer_class, spec, dtype):
    """The reference is mx.dequantize. Tests of FakeQuant use the compiled forward."""
    shape = (2, 3, 256) if dtype == mx.float16 else (6, 256)
    weight = normal(*shape)
    quantizer, qparams = moved_quantizer(quantizer_class, spec, dtype, weight)
    value = quantizer.fake_quantize(weight, qparams)
    packed = quantizer.pack(weight, qparams)
    stored = mx.dequantize(
        packed["weight"], packed["scales"], packed["biases"], spec.group_size, spec.bits
    )
    assert stored.dtype == packed["scales"].dtype == dtype
    assert value.dtype == mx.float32
    assert value.shape == stored.shape == shape
    assert mx.array_equal(value, stored.astype(mx.float32))
    assert not mx.array_equal(value, weight)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_levels_round_as_dequantize_does(bits, dtype, compiled):
    """Scales of all magnitudes and signs, none, and biases of any size beside them."""
    spec, groups = QuantSpec(bits=bits, group_size=32), 4096
    magnitude, sign, size, place = (
        mx.random.uniform(shape=(groups,), key=mx.random.key(i)) for i in range(4)
    )
    scales = 2.0 ** (-24 + 24 * magnitude) * mx.where(sign < 0.5, -1.0, 1.0)
    scales = mx.where(mx.arange(groups) % 64 == 0, 0.0, scales)
    biases = -(2**bits) * scales * (2 * place - 0.5) * 2.0 ** mx.round(6 * size - 3)
    biases = mx.where(mx.arange(groups) % 64 < 4, 0.01, biases)
    codes = 2**bits * mx.random.uniform(shape=(groups, 32), key=mx.random.key(4)) - 0.5
    weight = codes * scales[:, None] + biases[:, None]
    quantizer = LSQQuantizer(spec, dtype)
    function = quantizer.fake_quantize
    if compiled:
        function = mx.compile(function)
    qparams = {"scales": scales, "biases": biases}
    value, packed = function(weight, qparams), quantizer.pack(weight, qparams)
    assert len({*unpack_codes(packed["weight"], bits).flatten().tolist()}) == 2**bits
    assert mx.array_equal(value, dequantize(packed, spec, dtype).astype(mx.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quantizer_class", [LSQQuantizer, FixedScaleQuantizer])
def test_gradients_are_those_of_the_formula_bit_for_bit(quantizer_class, dtype):
    weight, probe = normal(16, 128), normal(16, 128, seed=1, scale=1.0)
    quantizer, qparams = moved_quantizer(quantizer_class, TWO_BITS, dtype, weight)
    values = quantizer.init_from_codes(quantizer.pack(weight, qparams)) or {}
    scales, biases = quantizer._grid(values)
    names = list(qparams)
    weight = 1.3 * weight

    def forward(weight, *values):
        return quantizer.fake_quantize(weight, dict(zip(names, values, strict=True)))

    primals = [weight, *(values[name] for name in names)]
    _, gradients = mx.compile(lambda *p: mx.vjp(forward, [*p], [probe]))(*primals)
    g = probe.reshape(-1, 32)
    t = (weight.reshape(-1, 32) - biases[:, None]) / scales[:, None]
    codes, margin = mx.clip(mx.round(t), 0, 3), quantizer.CLIP_MARGIN
    inside = (t >= -margin) & (t <= 3 + margin)
    assert 0 < inside.astype(mx.float32).mean().item() < 1
    d_scale = (g * mx.where(inside, codes - t, codes)).sum(axis=-1)
    d_bias = mx.where(inside, 0.0, g).sum(axis=-1)
    expected = {"scales": d_scale / 96**0.5, "biases": d_bias / 96**0.5}
    assert mx.array_equal(gradients[0].reshape(-1, 32), mx.where(inside, g, 0.0))
    for name, gradient in zip(names, gradients[1:], strict=True):
        assert mx.allclose(gradient, expected[name], rtol=1e-6, atol=1e-7)


def reference(weight, scales, biases, group, top, margin):
    """Return LSQ levels and gradients of sum(probe * levels) in float64."""
    w = weight.reshape(-1, group)
    s, b = scales[:, None], biases[:, None]
    t = (w - b) / s
    code = np.clip(np.rint(t), 0, top)
    inside = (t >= -margin) & (t <= top + margin)
    return code * s + b, inside, np.where(inside, code - t, code)


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_lsq_gradients_match_the_paper(bits):
    spec = QuantSpec(bits=bits, group_size=32)
    weight, probe = normal(5, 96), normal(5, 96, seed=1, scale=1.0)
    quantizer, qparams = moved_quantizer(LSQQuantizer, spec, mx.float32, 0.8 * weight)

    def loss(weight, qparams):
        return (quantizer.fake_quantize(weight, qparams) * probe).sum()

    d_weight, actual = mx.grad(loss, argnums=(0, 1))(weight, qparams)
    w, s, b, g = map(to_float64, (weight, qparams["scales"], qparams["biases"], probe))
    top = 2**bits - 1
    points, inside, gradient = reference(w, s, b, 32, top, 0.0)
    assert 0 < inside.mean() < 1
    np.testing.assert_allclose(
        np.array(quantizer.fake_quantize(weight, qparams)),
        points.reshape(5, 96),
        atol=1e-6,
    )
    factor, g = 1 / np.sqrt(32 * top), g.reshape(-1, 32)
    assert_close(d_weight, (g * inside).reshape(5, 96))
    assert_close(actual["scales"], factor * (g * gradient).sum(axis=1))
    assert_close(actual["biases"], factor * (g * ~inside).sum(axis=1))


def test_fixed_scale_gradients_match_finite_differences():
    """The function is linear in every cell and constant outside the range."""
    weight, probe = normal(1, 32), normal(1, 32, seed=1, scale=1.0)
    quantizer = FixedScaleQuantizer(TWO_BITS, mx.float32)
    quantizer.init(0.8 * weight)
    packed = quantizer.pack(weight, {})
    tensors = weight, packed["scales"], packed["biases"], probe
    w, s, b, g = (to_float64(value[0]) for value in tensors)
    t = (w - b) / s
    rounding_error = np.clip(np.rint(t), 0, 3) - np.clip(t, -0.5, 3.5)

    def surrogate(w):
        return ((np.clip((w - b) / s, -0.5, 3.5) + rounding_error) * s + b) @ g

    actual = mx.grad(lambda w: (quantizer.fake_quantize(w, {}) * probe).sum())(weight)
    moves = 1e-7 * np.eye(32)
    differences = [surrogate(w + m) - surrogate(w - m) for m in moves]
    assert 0 < np.mean(np.abs(t - 1.5) > 2) < 0.5
    assert_close(actual[0], np.array(differences) / 2e-7)


@pytest.mark.parametrize("spec", [SPECS[3], TWO_BITS], ids=str)
def test_initial_scales_have_less_error_than_those_of_the_range(spec):
    weight = normal(16, 256)

    def error(quantizer):
        served = quantizer.fake_quantize(weight, quantizer.init(weight))
        return mx.square(served - weight).sum().item()

    lsq, minmax = (q(spec, mx.float16) for q in (LSQQuantizer, MinMaxQuantizer))
    assert error(lsq) < 0.9 * error(minmax)


def test_constant_groups_stay_finite():
    """A zero group can have a zero scale, but all values stay finite."""
    weight = mx.concatenate([mx.zeros((1, 32)), mx.full((1, 32), 0.25)])
    for dtype in DTYPES:
        quantizer = LSQQuantizer(TWO_BITS, dtype)
        qparams = quantizer.init(weight)

        def loss(weight, qparams, quantizer=quantizer):
            return mx.square(quantizer.fake_quantize(weight, qparams) - 1.0).sum()

        actual = mx.grad(loss, argnums=(0, 1))(weight, qparams)
        value = quantizer.fake_quantize(weight, qparams)
        assert mx.all(mx.isfinite(value)).item()
        assert mx.abs(value - weight).max().item() < 0.09
        assert mx.all(mx.isfinite(actual[0])).item()
        assert all(mx.all(mx.isfinite(v)).item() for v in actual[1].values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("quantizer_class", "spec"),
    [
        *(kind for kind in KINDS if kind[1] in SPECS[:2]),
        *((MinMaxQuantizer, QuantSpec(mode=m)) for m in ("mxfp4", "nvfp4", "mxfp8")),
    ],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_zero_groups_stay_zero(quantizer_class, spec, dtype):
    """A scale of zero made NaN weights in other tools: mlx #1028."""
    weight, probe = normal(6, 128), normal(6, 128, seed=1)
    weight[0], weight[:, 64:] = 0, 0
    quantizer = quantizer_class(spec, dtype)
    qparams = quantizer.init(weight)

    def loss(parameters):
        return (quantizer.fake_quantize(parameters.pop("w"), parameters) * probe).sum()

    gradients = mx.grad(loss)({"w": weight} | qparams)
    assert all(mx.all(mx.isfinite(v)).item() for v in gradients.values())
    stored = dequantize(quantizer.pack(weight, qparams), spec, mx.float32)
    for value in (quantizer.fake_quantize(weight, qparams), stored):
        assert mx.all((value == 0) | (weight != 0)).item()
        assert mx.all(mx.isfinite(value)).item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("quantizer_class", [LSQQuantizer, FixedScaleQuantizer])
def test_init_from_codes_keeps_the_codes(quantizer_class, spec, dtype):
    """The codes of a PTQ method are not always the nearest ones."""
    packed = pack(normal(8, 256), spec, dtype)
    codes = mx.random.randint(0, 2**31, packed["weight"].shape, key=mx.random.key(2))
    packed["weight"] = codes.astype(mx.uint32)
    exact = {k: v if k == "weight" else v.astype(mx.float32) for k, v in packed.items()}
    quantizer = quantizer_class(spec, dtype)
    qparams = quantizer.init_from_codes(packed)
    weight = dequantize(exact, spec, mx.float32)
    repacked = quantizer.pack(weight, qparams)
    for name, value in packed.items():
        assert mx.array_equal(repacked[name], value), name
        assert repacked[name].dtype == value.dtype
    if quantizer_class is FixedScaleQuantizer:
        assert qparams == {}
        # Weights on the outermost levels have a gradient as well.
        gradient = mx.grad(lambda w: quantizer.fake_quantize(w, {}).sum())(weight)
        assert mx.all(gradient == 1).item()
        shifted = weight + 0.6 * mx.repeat(exact["scales"], spec.group_size, axis=-1)
        assert not mx.array_equal(quantizer.pack(shifted, {})["weight"], codes)
    elif spec.bits == 8 and dtype == mx.bfloat16:
        # Negative control: 16-bit weights lose codes.
        low_precision = quantizer.pack(dequantize(packed, spec, dtype), qparams)
        assert not mx.array_equal(low_precision["weight"], packed["weight"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"mode": "mxfp4", "quantizer": "lsq"},
            "mxfp4 has no trainable scales: use quantizer: minmax or fixed_scale",
        ),
        (
            {"mode": "q4_0", "quantizer": "fixed_scale"},
            "q4_0 has no trainable scales: use quantizer: minmax .type",
        ),
        (
            {"fake_quant_after_n_steps": 3, "quantizer": "fixed_scale"},
            "fixed_scale sets its scales before the first step",
        ),
        ({"bits": 4, "quantizer": "ternary"}, "2-bit codes: use bits: 2"),
        (
            {"mode": "mxfp4", "quantizer": "ternary"},
            "mxfp4 has no trainable scales: use quantizer: minmax or fixed_scale",
        ),
    ],
)
def test_config_refuses_contradictions(settings, message):
    with pytest.raises(ValidationError, match=message):
        QATConfig(**settings)


def assert_close(value, expected):
    scale = np.abs(expected).max()
    np.testing.assert_allclose(np.array(value) / scale, expected / scale, atol=2e-5)
