"""Rows that make up for each other's errors, against float64 arithmetic."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.quant_spec import QuantSpec
from lmx.quantization.packing import expand
from lmx.quantization.ptq import gptq_solver
from lmx.quantization.ptq.gptq_solver import output_hessian, solve_layer
from lmx.quantization.ptq.hessian import damped

GROUP, WIDTH, ROWS = 32, 96, 40
DRAW = np.random.default_rng(0)
INPUTS = DRAW.normal(size=(512, WIDTH)) @ (
    np.eye(WIDTH) + 0.1 * DRAW.normal(size=2 * (WIDTH,))
)
HESSIAN = damped(mx.array(INPUTS.T @ INPUTS / 512, mx.float32), GROUP)
WEIGHT = mx.array(0.05 * DRAW.normal(size=(ROWS, WIDTH)), mx.float32)


def answers(rank=8) -> np.ndarray:
    """Outputs that mostly count together."""
    slopes = DRAW.normal(size=(400, rank)) @ DRAW.normal(size=(rank, ROWS))
    slopes = slopes + 0.3 * DRAW.normal(size=slopes.shape)
    return slopes.T @ slopes / 400


def shrunk(matrix: np.ndarray) -> np.ndarray:
    """As `coupling` has it, rows in their own order."""
    share, size = gptq_solver.SHRINKAGE, len(matrix)
    return (1 - share) * matrix / np.trace(matrix) * size + share * np.eye(size)


def stored(spec, given) -> np.ndarray:
    given = None if given is None else mx.array(given, mx.float32)
    solution = solve_layer(WEIGHT, HESSIAN, spec, mx.float32, answers=given)
    return np.array(expand(solution.tensors, spec, mx.float32), np.float64)


def cost(found: np.ndarray, matrix: np.ndarray) -> float:
    off = found - np.array(WEIGHT, np.float64)
    return np.sum((matrix @ off @ np.array(HESSIAN.matrix, np.float64)) * off)


def test_what_is_passed_on_is_where_free_rows_lose_least():
    matrix = answers()
    rows = output_hessian(mx.array(matrix, mx.float32), sets=5)
    order = np.array(rows.order)
    assert sorted(order) == list(range(ROWS))
    whole = shrunk(matrix)[np.ix_(order, order)]
    errors = DRAW.normal(size=(ROWS, WIDTH))
    shifts = np.zeros((ROWS, WIDTH))
    for number, here in enumerate(rows.sets):
        # Of every set the errors from its target, which was shifted before.
        own = errors[here] - shifts[here]
        more = rows.passed_on(number, mx.array(own, mx.float32))
        for there, values in zip(rows.sets[number + 1 :], more, strict=True):
            shifts[there] += np.array(values, np.float64)
        done, free = slice(0, here.stop), slice(here.stop, None)
        best = -np.linalg.solve(whole[free, free], whole[free, done] @ errors[done])
        np.testing.assert_allclose(shifts[free], best, atol=1e-3 * np.abs(errors).max())


def test_neighbours_are_in_different_sets():
    rows = output_hessian(mx.eye(40), sets=16)
    order = np.array(rows.order)
    for here in rows.sets:
        assert len(order[here]) in (2, 3)
        assert np.all(np.diff(order[here]) == 16)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_less_is_lost_than_row_by_row(bits, monkeypatch):
    monkeypatch.setattr(gptq_solver, "LEAST_ROWS", 3)
    spec, matrix = QuantSpec(bits=bits, group_size=GROUP), answers()
    alone, together = stored(spec, None), stored(spec, matrix)
    assert cost(together, matrix) < 0.6 * cost(alone, matrix)
    # By the inputs alone it is more: that is what it costs.
    assert cost(together, np.eye(ROWS)) > cost(alone, np.eye(ROWS))


@pytest.mark.parametrize("given", [np.eye(ROWS), np.zeros((ROWS, ROWS))])
def test_outputs_that_count_for_themselves_change_nothing(given):
    spec = QuantSpec(bits=3, group_size=GROUP)
    np.testing.assert_allclose(stored(spec, given), stored(spec, None), atol=1e-6)


def test_a_layer_too_large_at_once_is_solved_in_more_sets(monkeypatch):
    spec, matrix = QuantSpec(bits=3, group_size=GROUP), answers()
    monkeypatch.setattr(gptq_solver, "AT_ONCE", WIDTH)
    sizes = []
    real = gptq_solver._LayerSolver.solve

    def noted(layer, weight, target):
        sizes.append(len(weight))
        return real(layer, weight, target)

    monkeypatch.setattr(gptq_solver._LayerSolver, "solve", noted)
    assert cost(stored(spec, matrix), matrix) < 0.6 * cost(stored(spec, None), matrix)
    assert sizes == [1] * 80
