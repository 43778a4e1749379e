"""GPTQ on the block types of GGUF, compared with float64 arithmetic."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from gguf_samples import awkward_weights
from lmx.config.quant_spec import GGUF_MODES, QuantSpec
from lmx.quantization.gguf_grid import FORMATS, round_to_nearest
from lmx.quantization.packing import dequantize
from lmx.quantization.ptq.gptq import gguf_solver
from lmx.quantization.ptq.gptq.solver import LayerProblem, solve_layers
from lmx.quantization.ptq.hessian import damped
from quantization_samples import to_float64
from test_float_solver import hessian_of, row_errors

WIDTH = 512
modes = pytest.mark.parametrize("mode", GGUF_MODES)


def error(weight, target, hessian):
    return row_errors(weight, target, hessian).sum()


@modes
def test_every_step_lowers_the_error(mode):
    form, target = FORMATS[mode], awkward_weights(24, WIDTH)
    hessian, matrix = hessian_of(mode, WIDTH), hessian_of(mode, WIDTH).matrix
    rtn = round_to_nearest(target, form)
    start = gguf_solver.fit_blocks(target, mx.diagonal(matrix), form)
    grid = gguf_solver.gguf_gptq(target, hessian, start, form)
    errors = [error(g.weight(), target, hessian) for g in (rtn, start, grid)]
    descent = (target - grid.weight()) @ matrix
    before = row_errors(grid.weight(), target, hessian)
    moved = gguf_solver.group_descent(grid, descent, matrix, form)
    after = row_errors(moved.weight(), target, hessian)
    assert (after <= before * (1 + 1e-4) + 1e-12).all()
    assert errors[1] < errors[0]
    assert errors[2] < 0.75 * errors[0]
    assert after.sum() < before.sum()
    for steps in (moved.steps, moved.min_steps):
        assert mx.array_equal(steps.astype(mx.float16).astype(mx.float32), steps)
    assert mx.array_equal(mx.round(moved.scales), moved.scales)
    assert moved.scales.min().item() >= form.scales[0]
    assert moved.scales.max().item() <= form.scales[1]
    assert moved.codes.max().item() < form.levels


@pytest.mark.parametrize("mode", ["q4_0", "q4_k", "q6_k"])
def test_refit_is_the_least_squares_solution(mode, monkeypatch):
    """Against float64, from steps that are 5% too large."""
    form = FORMATS[mode]
    hessian = hessian_of(mode, WIDTH)
    target = awkward_weights(24, WIDTH)[10:]
    grid = round_to_nearest(target, form)
    wrong = {name: 1.05 * getattr(grid, name) for name in ("steps", "min_steps")}
    wrong = replace(grid, **wrong)
    monkeypatch.setattr(gguf_solver, "to_float16", lambda values: values)
    descent = (target - wrong.weight()) @ hessian.matrix
    fitted = gguf_solver.refit_steps(wrong, descent, hessian.matrix)
    root = np.linalg.cholesky(to_float64(hessian.matrix))
    for row in range(3):
        columns = []
        for name in ("steps", "min_steps"):
            for block in range(grid.steps.shape[1]):
                unit = np.zeros(grid.steps.shape)
                unit[row, block] = 1
                zero = mx.zeros_like(grid.steps)
                values = {"steps": zero, "min_steps": zero, name: mx.array(unit)}
                values = {k: v.astype(mx.float32) for k, v in values.items()}
                columns.append(to_float64(replace(grid, **values).weight())[row])
        basis = root.T @ np.array(columns).T
        best = np.linalg.lstsq(basis, root.T @ to_float64(target)[row], rcond=None)[0]
        optimum = ((basis @ best - root.T @ to_float64(target)[row]) ** 2).sum()
        reached = row_errors(fitted.weight(), target, hessian)[row]
        assert reached <= 1.001 * optimum
        assert row_errors(wrong.weight(), target, hessian)[row] > 1.05 * optimum


@modes
def test_layer_is_never_worse_than_rtn(mode):
    target, spec = awkward_weights(24, WIDTH), QuantSpec(mode=mode)
    hessian = damped(mx.eye(WIDTH), spec.group_size, 0.01)
    layer = solve_layers(
        {"layer": LayerProblem(target)}, hessian, spec, mx.float16, refine_iters=1
    )["layer"]
    served = dequantize(layer.tensors, spec, mx.float16)
    assert not mx.isnan(served).any().item()
    rtn = round_to_nearest(target, FORMATS[mode]).weight()
    ours, theirs = (row_errors(w, target, hessian) for w in (served, rtn))
    assert (ours <= theirs * (1 + 1e-5) + 1e-12).all()
    assert np.median(ours[10:] / theirs[10:]) < 0.95
    assert (served[0] == 0).all().item()


def test_rows_with_nan_do_not_change_other_rows():
    target, spec = awkward_weights(24, WIDTH), QuantSpec(mode="q4_k")
    hessian = hessian_of("q4_k", WIDTH)

    def solve():
        problem = {"layer": LayerProblem(target)}
        layer = solve_layers(problem, hessian, spec, mx.float16, refine_iters=1)
        return dequantize(layer["layer"].tensors, spec, mx.float16)

    clean = solve()
    target[20, 5] = float("nan")
    others = mx.array([row for row in range(24) if row != 20])
    assert mx.array_equal(solve()[others], clean[others])
