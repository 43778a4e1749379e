"""The GPTQ solver compared with float64 arithmetic and exhaustive search."""

from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.quant_spec import QuantSpec
from lmx.errors import UserError
from lmx.quantization import affine_grid, backend
from lmx.quantization.affine_grid import AffineGrid, fit_grid
from lmx.quantization.packing import dequantize, pack
from lmx.quantization.ptq.gptq import solver as gptq_solver
from lmx.quantization.ptq.gptq.solver import (
    LayerProblem,
    coordinate_descent,
    fit_groups,
    gptq,
    refit,
    solve_layers,
)
from lmx.quantization.ptq.hessian import damped
from lmx.quantization.ptq.input_statistics import OutputError
from quantization_samples import correlated_inputs, naive_gptq, to_float64

GROUP, WIDTH, ROWS = 32, 128, 24
LEVELS = 4.0


def inputs(width=WIDTH, **options) -> np.ndarray:
    return correlated_inputs(width, **options)


def moments(x: np.ndarray) -> mx.array:
    return mx.array(x.T @ x / len(x), mx.float32)


def weights(rows=ROWS, width=WIDTH, seed=1) -> mx.array:
    samples = np.random.default_rng(seed).normal(size=(rows, width))
    return mx.array(0.05 * samples, mx.float32)


def row_errors(grid: AffineGrid, target, matrix) -> np.ndarray:
    """Return the squared error of every row in float64."""
    error = to_float64(grid.weight()) - to_float64(target)
    return np.einsum("nk,kl,nl->n", error, to_float64(matrix), error)


def solve_layer(weight, hessian, spec, dtype, **problem):
    """Return one layer, solved on its own."""
    layers = {"layer": LayerProblem(weight, **problem)}
    return solve_layers(layers, hessian, spec, dtype)["layer"]


def descent_of(grid: AffineGrid, target, hessian) -> mx.array:
    return (target - grid.weight()) @ hessian.matrix


def refitted(grid: AffineGrid, target, hessian) -> AffineGrid:
    descent = descent_of(grid, target, hessian)
    return refit(grid, descent, hessian.matrix, mx.float32)


def descended(grid: AffineGrid, target, hessian) -> AffineGrid:
    descent = descent_of(grid, target, hessian)
    return coordinate_descent(grid, descent, hessian.matrix, LEVELS)


@pytest.fixture(scope="module")
def hessian():
    return damped(moments(inputs()), GROUP, 0.01)


def test_hessian_factor_is_a_factor_of_the_inverse(hessian):
    order, factor = np.array(hessian.order), to_float64(hessian.factor)
    ordered = to_float64(hessian.matrix)[np.ix_(order, order)]
    assert np.allclose(factor.T @ factor @ ordered, np.eye(WIDTH), atol=1e-3)
    assert np.array_equal(factor, np.triu(factor))
    rows = weights()
    solved = to_float64(hessian.solve(rows)) @ to_float64(hessian.matrix)
    assert np.allclose(solved, to_float64(rows), atol=1e-4)


def test_hessian_order_puts_costly_columns_first_by_group(hessian):
    order, costs = np.array(hessian.order), np.diag(to_float64(hessian.matrix))
    assert sorted(order) == list(range(WIDTH))
    groups = order.reshape(-1, GROUP)
    assert all(len(set(group // GROUP)) == 1 for group in groups)
    assert all(np.all(np.diff(costs[group]) <= 0) for group in groups)
    first = costs[groups[:, 0]]
    assert np.all(np.diff(first) <= 0)


def test_gptq_codes_match_naive_obq(hessian):
    target = weights()
    grid = gptq(target, hessian, GROUP, LEVELS, mx.float32)
    scales, biases = to_float64(grid.scales), to_float64(grid.biases)

    def nearest(values, group):
        scale, bias = scales[:, group], biases[:, group]
        codes = np.clip(np.round((values - bias) / scale), 0, 3)
        return codes, scale * codes + bias

    expected = naive_gptq(target, hessian, GROUP, nearest)
    # A weight halfway between two codes can take either code.
    assert (to_float64(grid.codes) == expected).mean() > 0.999


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_numpy_and_mlx_give_the_same_grids(hessian, dtype, monkeypatch):
    """The solver uses NumPy on a CPU and MLX on a GPU."""
    target, costs = weights(), mx.diagonal(hessian.matrix)

    def grids():
        first = fit_groups(target, costs, GROUP, LEVELS, dtype)
        second = gptq(target, hessian, GROUP, LEVELS, dtype)
        return first, second, descended(first, target, hessian)

    numpy_grids = grids()
    calls = []
    monkeypatch.setattr(backend, "on_cpu", lambda: calls.append(1) or False)
    for expected, actual in zip(numpy_grids, grids(), strict=True):
        # A weight halfway between two codes can take either code.
        assert (to_float64(expected.codes) == to_float64(actual.codes)).mean() > 0.999
        distance = np.abs(to_float64(expected.weight()) - to_float64(actual.weight()))
        assert np.quantile(distance, 0.999) < 1e-6
    assert calls


def test_gptq_without_correlations_rounds_to_the_fitted_grid():
    target, hessian = weights(), damped(mx.eye(WIDTH), GROUP, 0.01)
    grid = gptq(target, hessian, GROUP, LEVELS, mx.float32)
    fitted = fit_groups(target, mx.diagonal(hessian.matrix), GROUP, LEVELS, mx.float32)
    assert mx.array_equal(grid.codes, fitted.codes)
    assert mx.allclose(grid.weight(), fitted.weight())


@pytest.mark.parametrize("power", [-6, 7])
def test_solve_layer_is_invariant_to_the_scale_of_inputs(hessian, power):
    scaled = damped(moments(inputs()) * 4.0**power, GROUP, 0.01)
    spec = QuantSpec(bits=2, group_size=GROUP)
    expected, actual = (
        solve_layer(weights(), h, spec, mx.float16) for h in (hessian, scaled)
    )
    assert mx.array_equal(expected.tensors["weight"], actual.tensors["weight"])


def test_solve_layer_rows_are_independent(hessian, monkeypatch):
    spec = QuantSpec(bits=3, group_size=GROUP)
    single_pass = solve_layer(weights(), hessian, spec, mx.float16)
    monkeypatch.setattr(gptq_solver, "MAX_ELEMENTS", 5 * WIDTH)
    size = 3 * WIDTH * WIDTH // GROUP
    monkeypatch.setattr(gptq_solver, "MAX_REFIT_ELEMENTS", size)
    parts = solve_layer(weights(), hessian, spec, mx.float16)
    magnitudes = [
        mx.abs(dequantize(s.tensors, spec, mx.float16)[:5])
        for s in (single_pass, parts)
    ]
    assert mx.allclose(*magnitudes, atol=2e-2)
    for name, error in single_pass.errors.items():
        assert parts.errors[name] == pytest.approx(error, rel=2e-2)


@pytest.mark.parametrize("coupled", [False, True])
def test_layers_with_one_input_are_solved_as_if_alone(hessian, coupled):
    spec, generator = QuantSpec(bits=3, group_size=GROUP), np.random.default_rng(3)
    layers = {}
    for name, rows in (("q", 96), ("k", 40), ("v", 40)):
        gradients = generator.normal(size=(500, rows)) @ generator.normal(
            size=(rows, rows)
        )
        fisher = mx.array(gradients.T @ gradients / 500, mx.float32)
        fisher = fisher if coupled and name != "k" else None
        layers[name] = LayerProblem(weights(rows), output_fisher=fisher)
    together = solve_layers(layers, hessian, spec, mx.float32)
    for name, layer in layers.items():
        alone = solve_layers({name: layer}, hessian, spec, mx.float32)[name]
        if coupled and name == "v":
            # It has 2 sets alone and 3 with a layer of more rows.
            assert together[name].errors["best"] == pytest.approx(
                alone.errors["best"], rel=0.2
            )
            continue
        expected, actual = (
            dequantize(solution.tensors, spec, mx.float32)
            for solution in (alone, together[name])
        )
        assert (mx.abs(expected - actual) < 1e-5).mean() > 0.99
        for candidate, error in alone.errors.items():
            assert together[name].errors[candidate] == pytest.approx(error, rel=1e-2)


def test_refit_and_descent_reduce_the_error(hessian):
    target = weights()
    grid = fit_groups(target, mx.diagonal(hessian.matrix), GROUP, LEVELS, mx.float32)
    before = row_errors(grid, target, hessian.matrix)
    for _ in range(3):
        for improved in (
            refitted(grid, target, hessian),
            descended(grid, target, hessian),
        ):
            after = row_errors(improved, target, hessian.matrix)
            assert np.all(after <= before * (1 + 1e-4))
            assert after.sum() < before.sum()
        grid, before = improved, after


def test_refit_is_least_squares(hessian):
    target = weights()
    grid = fit_groups(target, mx.diagonal(hessian.matrix), GROUP, LEVELS, mx.float32)
    grid = refitted(grid, target, hessian)
    errors = row_errors(grid, target, hessian.matrix)
    root = np.linalg.cholesky(to_float64(hessian.matrix)).T
    for row in range(ROWS):
        columns = []
        for kind in (to_float64(grid.codes)[row], np.ones(WIDTH)):
            for start in range(0, WIDTH, GROUP):
                column = np.zeros(WIDTH)
                column[start : start + GROUP] = kind[start : start + GROUP]
                columns.append(root @ column)
        _, residual, *_ = np.linalg.lstsq(
            np.array(columns).T, root @ to_float64(target)[row], rcond=None
        )
        assert errors[row] == pytest.approx(residual[0], rel=1e-3)


def test_refined_error_is_between_the_optimum_and_rtn():
    """The optimum over all 2-bit codes of six weights, with the best scale and bias."""
    x = inputs(6, count=400)
    hessian, target = damped(moments(x), 6, 0.01), weights(3, 6)
    root = np.linalg.cholesky(to_float64(hessian.matrix)).T
    rtn = AffineGrid(*_rtn_grid(target))
    grid = gptq(target, hessian, 6, LEVELS, mx.float32)
    for _ in range(3):
        grid = refitted(grid, target, hessian)
        grid = descended(grid, target, hessian)
    refined, rounded = (row_errors(g, target, hessian.matrix) for g in (grid, rtn))
    for row in range(len(target)):
        goal = root @ to_float64(target)[row]
        best = min(
            np.sum((goal - a @ np.linalg.lstsq(a, goal, rcond=None)[0]) ** 2)
            for codes in product(range(4), repeat=6)
            for a in [root @ np.stack([codes, np.ones(6)], axis=1)]
        )
        assert best * (1 - 1e-4) <= refined[row]
    assert refined.sum() < 0.6 * rounded.sum()


def _rtn_grid(target):
    low, high = target.min(axis=1), target.max(axis=1)
    scale = (high - low) / 3
    scale, low = scale[:, None], low[:, None]
    return affine_grid.nearest((target - low) / scale, LEVELS - 1), scale, low


@pytest.mark.parametrize(
    ("bits", "dtype"),
    [(2, mx.bfloat16), (3, mx.float16), (4, mx.bfloat16), (8, mx.float16)],
)
def test_stored_layer_has_the_lowest_error(hessian, bits, dtype):
    weight = weights().astype(dtype)
    spec = QuantSpec(bits=bits, group_size=GROUP)
    solution = solve_layer(weight, hessian, spec, dtype)
    errors = solution.errors
    assert errors["best"] <= min(errors.values()) * (1 + 1e-6)
    assert errors["best"] < 0.8 * errors["RTN"]
    stored = to_float64(dequantize(solution.tensors, spec, dtype).astype(mx.float32))
    error = stored - to_float64(weight.astype(mx.float32))
    matrix, original = to_float64(hessian.matrix), to_float64(weight.astype(mx.float32))
    share = np.sum((error @ matrix) * error) / np.sum((original @ matrix) * original)
    assert errors["best"] == pytest.approx(share, rel=1e-3)
    rounded = dequantize(pack(weight, spec, dtype), spec, dtype).astype(mx.float32)
    error = to_float64(rounded) - original
    share = np.sum((error @ matrix) * error) / np.sum((original @ matrix) * original)
    assert errors["RTN"] == pytest.approx(share, rel=1e-3)


def test_target_compensates_for_the_output_error(hessian):
    """w + strength H^-1 (X'(Y - X) w + X'd), which is w if X = Y and d = 0."""
    x = inputs()
    y = x + 0.3 * inputs(seed=5)
    mean = np.diag(x.T @ x / len(x)).mean()
    cross = mx.array(x.T @ (y - x) / len(x) / mean, mx.float32)
    spec = QuantSpec(bits=4, group_size=GROUP)

    output_drift = (
        0.1 * np.random.default_rng(6).normal(size=(len(x), ROWS)) + 0.02 * x[:, :ROWS]
    )
    residual = mx.array(output_drift.T @ x / len(x) / mean, mx.float32)

    def quantized(cross, residual, strength=1.0):
        error = (
            None if cross is None else OutputError(hessian, cross, residual, strength)
        )
        layer = solve_layer(weights(), hessian, spec, mx.float32, output_error=error)
        return to_float64(dequantize(layer.tensors, spec, mx.float32))

    target = y @ to_float64(weights()).T + output_drift

    def output_error(weight):
        return np.sum((x @ weight.T - target) ** 2)

    baseline, half = quantized(None, None), quantized(cross, residual, 0.5)
    inputs_only, full = quantized(cross, None), quantized(cross, residual)
    zeros = mx.zeros_like(cross), mx.zeros_like(residual)
    assert np.array_equal(quantized(*zeros), baseline)
    assert np.array_equal(quantized(cross, residual, 0.0), baseline)
    assert output_error(full) < output_error(half) < output_error(baseline)
    assert output_error(full) < output_error(inputs_only) < output_error(baseline)


def test_correction_uses_the_hessian_of_its_own_inputs(hessian):
    """A few inputs a thousand times larger than others break it otherwise."""
    x, generator = inputs(), np.random.default_rng(7)
    huge = generator.normal(size=WIDTH) * 1e3
    some = np.concatenate([x[:500], [huge] * 4])
    y = some * (1 + 0.01 * generator.normal(size=some.shape))
    mean = np.diag(some.T @ some / len(some)).mean()
    cross = mx.array(some.T @ (y - some) / len(some) / mean, mx.float32)

    def largest(hessian):
        correction = OutputError(hessian, cross, None, 1.0).correction
        return mx.abs(correction(weights(), slice(None))).max().item()

    own = damped(moments(some), WIDTH, 0.01)
    assert largest(own) < 0.1 < largest(hessian)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x[:20],
        lambda x: np.repeat(x[:10], 300, axis=0),
        lambda x: np.where(np.arange(WIDTH) % 3 == 0, 0.0, x),
        lambda x: np.zeros_like(x),
        lambda x: np.concatenate([x[:, :64], x[:, :64]], axis=1),
        lambda x: x * np.where(np.arange(WIDTH) == 3, 1e4, 1.0),
    ],
    ids=["few", "repeated", "dead", "zero", "duplicated", "outlier"],
)
def test_solve_layer_accepts_degenerate_inputs(make):
    hessian = damped(moments(make(inputs())), GROUP, 0.01)
    assert 0 < hessian.damping <= 1
    solution = solve_layer(
        weights(), hessian, QuantSpec(bits=2, group_size=GROUP), mx.float16
    )
    assert np.isfinite(list(solution.errors.values())).all()
    assert solution.errors["best"] <= solution.errors["RTN"]
    assert all(mx.isfinite(v).all() for v in solution.tensors.values())


def test_damping_is_raised_until_the_matrix_is_invertible():
    broken = mx.array(np.diag([1.0] * 127 + [-0.05]), mx.float32)
    assert damped(broken, GROUP, 0.01).damping == pytest.approx(0.1)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_inputs_that_are_not_finite_are_refused(value):
    """No damping makes their matrix invertible: the search had no end."""
    x = inputs()
    x[5, 3] = float(value)
    with pytest.raises(UserError, match="NaN or infinite inputs"):
        damped(moments(x), GROUP, 0.01)


def test_fit_grid_is_close_to_a_grid_search():
    weight = weights(6, 8)
    cost = mx.array(np.exp(np.random.default_rng(3).normal(size=8)), mx.float32)
    scale, bias = (to_float64(v) for v in fit_grid(weight.T, cost, LEVELS, mx.float32))
    rows, costs = to_float64(weight), to_float64(cost)

    def error(row, scale, bias):
        points = scale * np.arange(4) + bias
        off = np.abs(row[:, None] - points).min(axis=1)
        return np.sum(costs * off**2)

    for index, row in enumerate(rows):
        fitted = error(row, scale[index], bias[index])
        low, high = row.min(), row.max()
        assert fitted <= error(row, (high - low) / 3, low) * (1 + 1e-6)
        best = min(
            error(row, s, b)
            for s in np.linspace(0.2, 1.05, 60) * (high - low) / 3
            for b in np.linspace(low, low + 0.6 * (high - low), 60)
        )
        assert fitted <= 1.6 * best


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_round_to_dtype_is_the_same_in_numpy_and_mlx(dtype):
    values = np.random.default_rng(0).normal(size=4096).astype(np.float32)
    # The first values are halfway between two bfloat16 values, or zero.
    values[:4] = 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0
    expected = mx.array(values).astype(dtype).astype(mx.float32)
    assert np.array_equal(backend.round_to_dtype(values, dtype), np.array(expected))
    assert mx.array_equal(backend.round_to_dtype(mx.array(values), dtype), expected)


def test_round_to_float16_is_exact_for_all_exponents():
    """Subnormal values, overflow and ties included; one in 9,973 bit patterns."""
    values = np.arange(0, 2**32, 9973, dtype=np.uint32).view(np.float32)
    values = np.append(values[~np.isnan(values)], np.float32([2**-25, 65519, 65520]))
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16).astype(np.float32)
    rounded = backend.round_to_dtype(mx.array(values), mx.float16)
    assert np.array_equal(np.array(rounded), expected)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_grid_weight_is_that_of_half_precision_arithmetic(dtype):
    generator = np.random.default_rng(0)
    codes = mx.array(generator.integers(0, 256, (8, 64)), mx.float32)
    scales, biases = (
        mx.array(generator.normal(size=(8, 2)), dtype).astype(mx.float32)
        for _ in range(2)
    )
    parts = codes.reshape(8, 2, 32).astype(dtype)
    expected = parts * scales[..., None].astype(dtype) + biases[..., None].astype(dtype)
    weight = AffineGrid(codes, scales, biases).weight(dtype)
    assert mx.array_equal(weight, expected.reshape(8, 64).astype(mx.float32))
