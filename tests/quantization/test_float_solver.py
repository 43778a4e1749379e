"""GPTQ on floating-point grids compared with float64 arithmetic and full search."""

from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.quant_spec import QuantSpec
from lmx.models import float_formats
from lmx.models.float_formats import MODES
from lmx.quantization import backend
from lmx.quantization.float_grid import FloatGrid
from lmx.quantization.packing import dequantize, pack
from lmx.quantization.ptq.gptq import float_solver
from lmx.quantization.ptq.gptq.float_solver import float_gptq, group_descent
from lmx.quantization.ptq.gptq.solver import LayerProblem, solve_layers
from lmx.quantization.ptq.hessian import damped
from quantization_samples import correlated_inputs, naive_gptq, to_float64

WIDTH, ROWS = 96, 24
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.unique([E2M1, -E2M1])
modes = pytest.mark.parametrize("mode", MODES)


def hessian_of(mode, width=WIDTH, seed=0):
    """The Hessian of correlated inputs of different magnitudes, as in a model."""
    x = correlated_inputs(width, seed=seed)
    group_size = min(QuantSpec(mode=mode).group_size, width)
    return damped(mx.array(x.T @ x / 2048, mx.float32), group_size, 0.01)


def weights(rows=ROWS, width=WIDTH, size=0.3, seed=1) -> mx.array:
    samples = np.random.default_rng(seed).standard_t(5, size=(rows, width))
    return mx.array(size * samples, mx.float32)


def row_errors(weight, target, hessian) -> np.ndarray:
    """Return the squared output error of every row in float64."""
    error = to_float64(weight) - to_float64(target)
    return np.einsum("nk,kl,nl->n", error, to_float64(hessian.matrix), error)


def solve(weight, hessian, spec, dtype=mx.float32, **options):
    layers = {"layer": LayerProblem(weight)}
    return solve_layers(layers, hessian, spec, dtype, **options)["layer"]


@modes
def test_gptq_elements_match_naive_obq(mode):
    hessian, target, spec = hessian_of(mode), weights(), QuantSpec(mode=mode)
    grid = float_gptq(target, hessian, spec)
    number = MODES[mode].elements
    codes = [c for c in range(2**number.bits) if c % 128 != 127]
    levels = np.unique(number.values(mx.array(codes, mx.uint8))).astype(np.float64)
    scales = to_float64(grid.scales)

    def nearest(values, group):
        scale = scales[:, group]
        distances = np.abs(values[:, None] / scale[:, None] - levels)
        elements = levels[distances.argmin(axis=1)]
        return elements, scale * elements

    expected = naive_gptq(target, hessian, spec.group_size, nearest)
    # A weight halfway between two elements can take either.
    assert (to_float64(grid.elements) == expected).mean() > 0.995


@modes
def test_scale_of_every_group_has_the_least_error(mode):
    """Of the first group in the order, whose error is known for any scale."""
    hessian, target, spec = hessian_of(mode), weights(), QuantSpec(mode=mode)
    size, number = spec.group_size, MODES[mode]
    grid = float_gptq(target, hessian, spec)
    first = np.array(hessian.order)[:size]
    factor = to_float64(hessian.factor)[:size, :size]
    codes = number.range_codes(mx.abs(target[:, mx.array(first)]).max(axis=1))
    candidates = to_float64(number.candidates(codes, number.scales.SEARCH))
    errors = []
    for scale in candidates:
        rows, error = to_float64(target)[:, first], 0
        for column in range(size):
            steps = (rows[:, column] / scale).astype(np.float32)
            element = number.elements.nearest(steps, number.elements.max)
            miss = (rows[:, column] - scale * element) / factor[column, column]
            rows = rows - np.outer(miss, factor[column])
            error = error + miss**2
        errors.append(error)
    chosen = to_float64(grid.scales)[:, first[0] // size]
    best = candidates[np.argmin(errors, axis=0), np.arange(ROWS)]
    assert (chosen == best).mean() > 0.95
    # The full range is not always best.
    assert (chosen != candidates[0]).any() or mode == "mxfp8"


@modes
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_result_is_served_bit_for_bit_and_better_than_rtn(mode, dtype):
    hessian, spec = hessian_of(mode), QuantSpec(mode=mode)
    target = weights().astype(dtype)
    layer = solve(target, hessian, spec, dtype)
    served = dequantize(layer.tensors, spec, dtype)
    rtn = dequantize(pack(target, spec, dtype), spec, dtype)
    actual, rounded = (row_errors(w, target, hessian) for w in (served, rtn))
    assert (actual <= rounded * (1 + 1e-4)).all()
    assert actual.sum() < 0.5 * rounded.sum()
    output = row_errors(mx.zeros_like(target), target, hessian).sum()
    assert layer.errors["best"] == pytest.approx(actual.sum() / output, rel=1e-3)
    assert layer.errors["RTN"] == pytest.approx(rounded.sum() / output, rel=1e-3)


@modes
def test_every_step_reduces_the_error(mode):
    hessian, spec = hessian_of(mode), QuantSpec(mode=mode)
    errors = solve(weights(), hessian, spec, refine_iters=3).errors
    values = [errors[f"refined {number}"] for number in (1, 2, 3)]
    assert errors["RTN"] > errors["GPTQ"] > values[0] > values[1] >= values[2]
    assert values[2] == errors["best"]


@modes
def test_group_descent_never_raises_the_error_of_a_row(mode):
    """From random elements, too."""
    hessian, target, spec = hessian_of(mode), weights(), QuantSpec(mode=mode)
    packed = pack(target, spec, mx.float32)
    words = mx.random.randint(0, 1 << 30, packed["weight"].shape, key=mx.random.key(2))
    packed["weight"] = words.astype(mx.uint32) & 0x77777777
    grid = FloatGrid.from_tensors(packed, spec)
    before = row_errors(grid.weight(), target, hessian)
    for _ in range(3):
        descent = (target - grid.weight()) @ hessian.matrix
        grid = group_descent(grid, descent, hessian.matrix, MODES[mode])
        after = row_errors(grid.weight(), target, hessian)
        assert (after <= before * (1 + 1e-4)).all()
        assert after.sum() < before.sum()
        before = after


def test_error_is_between_the_optimum_and_rtn():
    """The optimum over all E2M1 elements of three weights and all E4M3 scales."""
    hessian, target = hessian_of("nvfp4", 3), weights(6, 3)
    spec = QuantSpec(mode="nvfp4")
    object.__setattr__(spec, "group_size", 3)
    grid = float_gptq(target, hessian, spec)
    for _ in range(3):
        descent = (target - grid.weight()) @ hessian.matrix
        grid = group_descent(grid, descent, hessian.matrix, MODES["nvfp4"])
    scales = np.array(MODES["nvfp4"].scales.values(mx.arange(1, 127)), np.float64)
    elements = np.array([*product(E2M1, repeat=3)])
    root = np.linalg.cholesky(to_float64(hessian.matrix))
    refined, plain = (row_errors(grid.weight(), target, hessian), [])
    for row, error in zip(to_float64(target), refined, strict=True):
        misses = (scales[:, None, None] * elements - row) @ root
        optimum = (misses**2).sum(axis=-1).min()
        assert optimum <= error * (1 + 1e-4)
        range_scale = scales[np.abs(scales - np.abs(row).max() / 6).argmin()]
        rounded = E2M1[np.abs(row[:, None] / range_scale - E2M1).argmin(axis=1)]
        plain.append((((range_scale * rounded - row) @ root) ** 2).sum())
        assert error <= plain[-1] * (1 + 1e-4)
    assert refined.sum() < 0.6 * sum(plain)


@modes
def test_zero_groups_rows_and_inputs(mode):
    """Zero groups gave NaN in other tools: mlx #1028."""
    spec = QuantSpec(mode=mode)
    target = weights()
    target[:, :32], target[3] = 0, 0
    x = np.random.default_rng(0).normal(size=(512, WIDTH))
    x[:, 40:50] = 0
    moments = mx.array(x.T @ x, mx.float32)
    for matrix in (moments, mx.zeros_like(moments), mx.eye(WIDTH)):
        hessian = damped(matrix, spec.group_size, 0.01)
        layer = solve(target, hessian, spec)
        served = dequantize(layer.tensors, spec, mx.float32)
        assert mx.isfinite(served).all()
        assert mx.all(served[3] == 0)
        assert layer.tensors["scales"].max().item() <= 254
        if matrix is not moments:
            assert mx.all(served[:, :32] == 0)
    everything = solve(mx.zeros_like(target), hessian, spec)
    assert mx.all(dequantize(everything.tensors, spec, mx.float32) == 0)
    assert everything.errors["best"] == 0


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e4])
@modes
def test_very_small_and_large_weights(mode, size):
    """E4M3 scales end at 448 and 2^-9: the largest weight of nvfp4 is 2,688."""
    hessian, spec = hessian_of(mode), QuantSpec(mode=mode)
    target = weights(size=size)
    layer = solve(target, hessian, spec)
    served = dequantize(layer.tensors, spec, mx.float32)
    rtn = dequantize(pack(target, spec, mx.float32), spec, mx.float32)
    assert mx.isfinite(served).all()
    errors = [row_errors(w / size, target / size, hessian).sum() for w in (served, rtn)]
    assert errors[0] <= errors[1] * (1 + 1e-4)


@modes
def test_a_candidate_with_nan_is_not_chosen(mode, monkeypatch):
    """Rare NaN of a kernel, as in mlx #896, must not reach the checkpoint."""
    hessian, spec, real = hessian_of(mode), QuantSpec(mode=mode), FloatGrid.from_tensors

    def damaged(tensors, spec):
        grid = real(tensors, spec)
        return FloatGrid(grid.elements, mx.where(grid.scales > 0, mx.nan, 0.0))

    monkeypatch.setattr(float_solver.FloatGrid, "from_tensors", damaged)
    layer = solve(weights(), hessian, spec)
    assert mx.isfinite(dequantize(layer.tensors, spec, mx.float32)).all()
    assert np.isfinite(layer.errors["best"])


@modes
def test_numpy_and_mlx_give_the_same_grids(mode, monkeypatch):
    """The solver uses NumPy on a CPU and MLX on a GPU."""
    hessian, target, spec = hessian_of(mode), weights(8), QuantSpec(mode=mode)

    def grids():
        grid = float_gptq(target, hessian, spec)
        descent = (target - grid.weight()) @ hessian.matrix
        return grid, group_descent(grid, descent, hessian.matrix, MODES[mode])

    numpy_grids = grids()
    for module in (backend, float_formats):
        monkeypatch.setattr(module, "on_cpu", lambda: False)
    for expected, actual in zip(numpy_grids, grids(), strict=True):
        assert (expected.scales == actual.scales).mean().item() > 0.97
        assert (expected.elements == actual.elements).mean().item() > 0.97
