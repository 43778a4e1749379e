"""Error compensation between rows, compared with float64 arithmetic."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.quant_spec import QuantSpec
from lmx.quantization.packing import dequantize
from lmx.quantization.ptq.gptq import solver as gptq_solver
from lmx.quantization.ptq.gptq.solver import LayerProblem, solve_layers
from lmx.quantization.ptq.hessian import OUTPUT_SHRINKAGE, OutputHessian, damped

GROUP, WIDTH, ROWS = 32, 96, 40
RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(512, WIDTH)) @ (
    np.eye(WIDTH) + 0.1 * RNG.normal(size=2 * (WIDTH,))
)
HESSIAN = damped(mx.array(INPUTS.T @ INPUTS / 512, mx.float32), GROUP, 0.01)
WEIGHT = mx.array(0.05 * RNG.normal(size=(ROWS, WIDTH)), mx.float32)


def output_fisher(rank=8) -> np.ndarray:
    """Return the Fisher information of strongly coupled outputs."""
    gradients = RNG.normal(size=(400, rank)) @ RNG.normal(size=(rank, ROWS))
    gradients = gradients + 0.3 * RNG.normal(size=gradients.shape)
    return gradients.T @ gradients / 400


def shrunk_hessian(matrix: np.ndarray) -> np.ndarray:
    """Return the output Hessian in the original row order."""
    share, size = OUTPUT_SHRINKAGE, len(matrix)
    return (1 - share) * matrix / np.trace(matrix) * size + share * np.eye(size)


def quantized(spec, fisher) -> np.ndarray:
    fisher = None if fisher is None else mx.array(fisher, mx.float32)
    layers = {"layer": LayerProblem(WEIGHT, output_fisher=fisher)}
    layer = solve_layers(layers, HESSIAN, spec, mx.float32)["layer"]
    return np.array(dequantize(layer.tensors, spec, mx.float32), np.float64)


def cost(weight: np.ndarray, fisher: np.ndarray) -> float:
    error = weight - np.array(WEIGHT, np.float64)
    return np.sum((fisher @ error @ np.array(HESSIAN.matrix, np.float64)) * error)


def test_compensation_minimizes_the_error_of_later_rows():
    fisher = output_fisher()
    hessian = OutputHessian.from_fisher(mx.array(fisher, mx.float32), num_sets=5)
    order = np.array(hessian.order)
    assert sorted(order) == list(range(ROWS))
    matrix = shrunk_hessian(fisher)[np.ix_(order, order)]
    errors = RNG.normal(size=(ROWS, WIDTH))
    shifts = np.zeros((ROWS, WIDTH))
    for index, rows in enumerate(hessian.sets):
        # Earlier sets shifted the target of this set.
        residual = mx.array(errors[rows] - shifts[rows], mx.float32)
        compensation = hessian.compensation(index, residual)
        for later, values in zip(hessian.sets[index + 1 :], compensation, strict=True):
            shifts[later] += np.array(values, np.float64)
        done, free = slice(0, rows.stop), slice(rows.stop, None)
        best = -np.linalg.solve(matrix[free, free], matrix[free, done] @ errors[done])
        np.testing.assert_allclose(shifts[free], best, atol=1e-3 * np.abs(errors).max())


def test_neighboring_rows_are_in_different_sets():
    hessian = OutputHessian.from_fisher(mx.eye(40), num_sets=16)
    order = np.array(hessian.order)
    for rows in hessian.sets:
        assert len(order[rows]) in (2, 3)
        assert np.all(np.diff(order[rows]) == 16)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_output_hessian_reduces_the_cost(bits, monkeypatch):
    monkeypatch.setattr(gptq_solver, "MIN_ROWS_PER_SET", 3)
    monkeypatch.setattr(gptq_solver, "MAX_SETS", 16)
    spec, fisher = QuantSpec(bits=bits, group_size=GROUP), output_fisher()
    independent, coupled = quantized(spec, None), quantized(spec, fisher)
    assert cost(coupled, fisher) < 0.6 * cost(independent, fisher)
    # The cost of independent outputs increases.
    assert cost(coupled, np.eye(ROWS)) > cost(independent, np.eye(ROWS))


@pytest.mark.parametrize("fisher", [np.eye(ROWS), np.zeros((ROWS, ROWS))])
def test_uncoupled_outputs_change_nothing(fisher):
    spec = QuantSpec(bits=3, group_size=GROUP)
    np.testing.assert_allclose(
        quantized(spec, fisher), quantized(spec, None), atol=1e-6
    )


def test_large_layer_is_solved_in_more_sets(monkeypatch):
    spec, fisher = QuantSpec(bits=3, group_size=GROUP), output_fisher()
    monkeypatch.setattr(gptq_solver, "MAX_ELEMENTS", WIDTH)
    sizes = []
    original = gptq_solver.gptq

    def recorded(target, *args):
        sizes.append(len(target))
        return original(target, *args)

    monkeypatch.setattr(gptq_solver, "gptq", recorded)
    coupled, independent = quantized(spec, fisher), quantized(spec, None)
    assert cost(coupled, fisher) < 0.6 * cost(independent, fisher)
    # Each of one row, and padded as `ProcessGroup.own_rows` pads.
    assert len(sizes) == 80
