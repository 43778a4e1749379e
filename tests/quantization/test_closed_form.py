"""The closed form against float64 arithmetic and exhaustive search."""

from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.quant_spec import QuantSpec
from lmx.quantization import backend
from lmx.quantization.affine_grid import AffineGrid, fit_grid, nearest
from lmx.quantization.packing import expand, pack
from lmx.quantization.ptq import gptq_solver
from lmx.quantization.ptq.error_propagation import OutputError
from lmx.quantization.ptq.gptq_columns import coordinate_descent, fit_groups, gptq
from lmx.quantization.ptq.gptq_solver import refit, solve_layer
from lmx.quantization.ptq.hessian import damped

GROUP, WIDTH, ROWS = 32, 128, 24
LEVELS = 4.0


def inputs(width=WIDTH, count=2048, seed=0) -> np.ndarray:
    """Correlated, of different sizes, as a model's are."""
    generator = np.random.default_rng(seed)
    mixed = np.eye(width) + generator.normal(size=(width, width)) / np.sqrt(width)
    sizes = np.exp(0.7 * generator.normal(size=width))
    return generator.normal(size=(count, width)) @ mixed * sizes


def moments(x: np.ndarray) -> mx.array:
    return mx.array(x.T @ x / len(x), mx.float32)


def weights(rows=ROWS, width=WIDTH, seed=1) -> mx.array:
    draw = np.random.default_rng(seed).normal(size=(rows, width))
    return mx.array(0.05 * draw, mx.float32)


def double(value: mx.array) -> np.ndarray:
    return np.array(value).astype(np.float64)


def lost(grid: AffineGrid, target, matrix) -> np.ndarray:
    """The squared error of every row, in float64."""
    off = double(grid.weight()) - double(target)
    return np.einsum("nk,kl,nl->n", off, double(matrix), off)


@pytest.fixture(scope="module")
def hessian():
    return damped(moments(inputs()), GROUP)


def test_the_factor_is_one_of_the_inverse(hessian):
    order, factor = np.array(hessian.order), double(hessian.factor)
    ordered = double(hessian.matrix)[np.ix_(order, order)]
    assert np.allclose(factor.T @ factor @ ordered, np.eye(WIDTH), atol=1e-3)
    assert np.array_equal(factor, np.triu(factor))
    rows = weights()
    solved = double(hessian.solve(rows)) @ double(hessian.matrix)
    assert np.allclose(solved, double(rows), atol=1e-4)


def test_the_costliest_columns_come_first_and_groups_stay_together(hessian):
    order, costs = np.array(hessian.order), np.diag(double(hessian.matrix))
    assert sorted(order) == list(range(WIDTH))
    groups = order.reshape(-1, GROUP)
    assert all(len(set(group // GROUP)) == 1 for group in groups)
    assert all(np.all(np.diff(costs[group]) <= 0) for group in groups)
    first = costs[groups[:, 0]]
    assert np.all(np.diff(first) <= 0)


def naive_gptq(target, hessian, grid: AffineGrid) -> np.ndarray:
    """Optimal brain quantization: after every column, the inverse without it."""
    order = np.array(hessian.order)
    left, codes = double(target), np.zeros(target.shape)
    inverse = np.linalg.inv(double(hessian.matrix))
    scales, biases = double(grid.scales), double(grid.biases)
    for column in order:
        scale, bias = (v[:, column // GROUP] for v in (scales, biases))
        code = np.clip(np.round((left[:, column] - bias) / scale), 0, 3)
        codes[:, column] = code
        error = left[:, column] - (scale * code + bias)
        own = inverse[column, column]
        left = left - np.outer(error, inverse[column] / own)
        inverse = inverse - np.outer(inverse[:, column], inverse[column]) / own
    return codes


def test_gptqs_codes_are_those_of_the_naive_way(hessian):
    target = weights()
    grid = gptq(target, hessian, GROUP, LEVELS, mx.float32)
    expected = naive_gptq(target, hessian, grid)
    # A weight in the middle of two codes may fall on either side.
    assert (double(grid.codes) == expected).mean() > 0.999


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_both_libraries_find_the_same(hessian, dtype, monkeypatch):
    """NumPy, as on a CPU, and MLX, as on a GPU."""
    target, costs = weights(), mx.diagonal(hessian.matrix)

    def grids():
        first = fit_groups(target, costs, GROUP, LEVELS, dtype)
        second = gptq(target, hessian, GROUP, LEVELS, dtype)
        return first, second, coordinate_descent(first, target, hessian.matrix, LEVELS)

    ours = grids()
    seen = []
    monkeypatch.setattr(backend, "on_cpu", lambda: seen.append(1) or False)
    for one, other in zip(ours, grids(), strict=True):
        # A weight in the middle of two codes may fall on either side.
        assert (double(one.codes) == double(other.codes)).mean() > 0.999
        apart = np.abs(double(one.weight()) - double(other.weight()))
        assert np.quantile(apart, 0.999) < 1e-6
    assert seen


def test_without_correlations_gptq_rounds_to_the_fitted_grid():
    target, hessian = weights(), damped(mx.eye(WIDTH), GROUP)
    found = gptq(target, hessian, GROUP, LEVELS, mx.float32)
    plain = fit_groups(target, mx.diagonal(hessian.matrix), GROUP, LEVELS, mx.float32)
    assert mx.array_equal(found.codes, plain.codes)
    assert mx.allclose(found.weight(), plain.weight())


@pytest.mark.parametrize("power", [-6, 7])
def test_the_size_of_the_inputs_is_of_no_account(hessian, power):
    scaled = damped(moments(inputs()) * 4.0**power, GROUP)
    spec = QuantSpec(bits=2, group_size=GROUP)
    one, other = (
        solve_layer(weights(), h, spec, mx.float16) for h in (hessian, scaled)
    )
    assert mx.array_equal(one.tensors["weight"], other.tensors["weight"])


def test_rows_are_independent(hessian, monkeypatch):
    spec = QuantSpec(bits=3, group_size=GROUP)
    whole = solve_layer(weights(), hessian, spec, mx.float16)
    monkeypatch.setattr(gptq_solver, "AT_ONCE", 5 * WIDTH)
    monkeypatch.setattr(
        "lmx.quantization.ptq.gptq_solver.MAX_REFIT_ELEMENTS",
        3 * WIDTH * WIDTH // GROUP,
    )
    parts = solve_layer(weights(), hessian, spec, mx.float16)
    same = [mx.abs(expand(s.tensors, spec, mx.float16)[:5]) for s in (whole, parts)]
    assert mx.allclose(*same, atol=2e-2)
    for way, error in whole.errors.items():
        assert parts.errors[way] == pytest.approx(error, rel=2e-2)


def test_neither_refit_nor_descent_loses_more(hessian):
    target = weights()
    grid = fit_groups(target, mx.diagonal(hessian.matrix), GROUP, LEVELS, mx.float32)
    before = lost(grid, target, hessian.matrix)
    for _ in range(3):
        for improved in (
            refit(grid, target, hessian.matrix, mx.float32),
            coordinate_descent(grid, target, hessian.matrix, LEVELS),
        ):
            after = lost(improved, target, hessian.matrix)
            assert np.all(after <= before * (1 + 1e-4))
            assert after.sum() < before.sum()
        grid, before = improved, after


def test_the_refit_is_least_squares(hessian):
    target = weights()
    grid = fit_groups(target, mx.diagonal(hessian.matrix), GROUP, LEVELS, mx.float32)
    found = lost(
        refit(grid, target, hessian.matrix, mx.float32), target, hessian.matrix
    )
    root = np.linalg.cholesky(double(hessian.matrix)).T
    for row in range(ROWS):
        columns = []
        for kind in (double(grid.codes)[row], np.ones(WIDTH)):
            for start in range(0, WIDTH, GROUP):
                column = np.zeros(WIDTH)
                column[start : start + GROUP] = kind[start : start + GROUP]
                columns.append(root @ column)
        _, rest, *_ = np.linalg.lstsq(
            np.array(columns).T, root @ double(target)[row], rcond=None
        )
        assert found[row] == pytest.approx(rest[0], rel=1e-3)


def test_between_the_best_there_is_and_plain_rounding():
    """Six weights of 2 bits: every code tried, with the best scale and bias of each."""
    x = inputs(6, 400)
    hessian, target = damped(moments(x), 6), weights(8, 6)
    root = np.linalg.cholesky(double(hessian.matrix)).T
    plain = AffineGrid(*_plain(target))
    grid = gptq(target, hessian, 6, LEVELS, mx.float32)
    for _ in range(3):
        grid = refit(grid, target, hessian.matrix, mx.float32)
        grid = coordinate_descent(grid, target, hessian.matrix, LEVELS)
    found, rounded = (lost(g, target, hessian.matrix) for g in (grid, plain))
    for row in range(len(target)):
        goal = root @ double(target)[row]
        best = min(
            np.sum((goal - a @ np.linalg.lstsq(a, goal, rcond=None)[0]) ** 2)
            for codes in product(range(4), repeat=6)
            for a in [root @ np.stack([codes, np.ones(6)], axis=1)]
        )
        assert best * (1 - 1e-4) <= found[row]
    assert found.sum() < 0.6 * rounded.sum()


def _plain(target):
    low, high = target.min(axis=1), target.max(axis=1)
    scale = (high - low) / 3
    scale, low = scale[:, None], low[:, None]
    return nearest((target - low) / scale, LEVELS - 1), scale, low


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_what_is_kept_is_the_best_and_what_is_stored(hessian, bits, dtype):
    weight = weights().astype(dtype)
    spec = QuantSpec(bits=bits, group_size=GROUP)
    solution = solve_layer(weight, hessian, spec, dtype)
    errors = solution.errors
    assert errors["kept"] <= min(errors.values()) * (1 + 1e-6)
    assert errors["kept"] < 0.8 * errors["round to nearest"]
    stored = double(expand(solution.tensors, spec, dtype).astype(mx.float32))
    off = stored - double(weight.astype(mx.float32))
    matrix, whole = double(hessian.matrix), double(weight.astype(mx.float32))
    share = np.sum((off @ matrix) * off) / np.sum((whole @ matrix) * whole)
    assert errors["kept"] == pytest.approx(share, rel=1e-3)
    rounded = expand(pack(weight, spec, dtype), spec, dtype).astype(mx.float32)
    off = double(rounded) - whole
    share = np.sum((off @ matrix) * off) / np.sum((whole @ matrix) * whole)
    assert errors["round to nearest"] == pytest.approx(share, rel=1e-3)


def test_the_target_makes_up_for_what_is_missing(hessian):
    """w + share H^-1 (X'(Y - X) w + X'd), which is w where X is Y and d nothing."""
    x = inputs()
    y = x + 0.3 * inputs(seed=5)
    mean = np.diag(x.T @ x / len(x)).mean()
    cross = mx.array(x.T @ (y - x) / len(x) / mean, mx.float32)
    spec = QuantSpec(bits=4, group_size=GROUP)

    more = (
        0.1 * np.random.default_rng(6).normal(size=(len(x), ROWS)) + 0.02 * x[:, :ROWS]
    )
    residual = mx.array(more.T @ x / len(x) / mean, mx.float32)

    def stored(cross, residual, share=1.0):
        missing = None if cross is None else OutputError(cross, residual, share)
        solution = solve_layer(weights(), hessian, spec, mx.float32, missing=missing)
        return double(expand(solution.tensors, spec, mx.float32))

    wanted = y @ double(weights()).T + more

    def missed(found):
        return np.sum((x @ found.T - wanted) ** 2)

    plain, half = stored(None, None), stored(cross, residual, 0.5)
    inputs_alone, full = stored(cross, None), stored(cross, residual)
    nothing = mx.zeros_like(cross), mx.zeros_like(residual)
    assert np.array_equal(stored(*nothing), plain)
    assert np.array_equal(stored(cross, residual, 0.0), plain)
    assert missed(full) < missed(half) < missed(plain)
    assert missed(full) < missed(inputs_alone) < missed(plain)


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
    ids=["few", "repeated", "dead", "none", "twins", "outlier"],
)
def test_however_poor_the_inputs(make):
    hessian = damped(moments(make(inputs())), GROUP)
    assert 0 < hessian.damping <= 1
    solution = solve_layer(
        weights(), hessian, QuantSpec(bits=2, group_size=GROUP), mx.float16
    )
    assert np.isfinite(list(solution.errors.values())).all()
    assert solution.errors["kept"] <= solution.errors["round to nearest"]
    assert all(mx.isfinite(v).all() for v in solution.tensors.values())


def test_a_matrix_that_cannot_be_inverted_is_damped_until_it_can():
    broken = mx.array(np.diag([1.0] * 127 + [-0.05]), mx.float32)
    assert damped(broken, GROUP).damping == pytest.approx(0.1)


def test_the_grid_of_a_group_against_a_search_of_all():
    weight = weights(6, 8)
    cost = mx.array(np.exp(np.random.default_rng(3).normal(size=8)), mx.float32)
    scale, bias = (double(v) for v in fit_grid(weight.T, cost, LEVELS, mx.float32))
    rows, costs = double(weight), double(cost)

    def error(row, scale, bias):
        points = scale * np.arange(4) + bias
        off = np.abs(row[:, None] - points).min(axis=1)
        return np.sum(costs * off**2)

    for index, row in enumerate(rows):
        found = error(row, scale[index], bias[index])
        low, high = row.min(), row.max()
        assert found <= error(row, (high - low) / 3, low) * (1 + 1e-6)
        best = min(
            error(row, s, b)
            for s in np.linspace(0.2, 1.05, 120) * (high - low) / 3
            for b in np.linspace(low, low + 0.6 * (high - low), 120)
        )
        assert found <= 1.6 * best


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_both_libraries_store_alike(dtype):
    values = np.random.default_rng(0).normal(size=4096).astype(np.float32)
    # Halfway between two that bfloat16 has, and nothing.
    values[:4] = 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0
    expected = mx.array(values).astype(dtype).astype(mx.float32)
    assert np.array_equal(backend.round_to_dtype(values, dtype), np.array(expected))
    assert mx.array_equal(backend.round_to_dtype(mx.array(values), dtype), expected)
