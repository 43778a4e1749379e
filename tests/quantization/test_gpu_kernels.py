"""The GPU kernels of GPTQ, and the number of launches.

Without a GPU, the bodies of the kernels run as C++.
"""

import ctypes
import re
import shutil
import subprocess

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.quant_spec import QuantSpec
from lmx.models import float_formats
from lmx.models.float_formats import E2M1, E4M3, MODES
from lmx.quantization import affine_grid, backend, gpu_kernels
from lmx.quantization.affine_grid import LEAST_SQUARES_ITERS, SHRINK_FACTORS
from lmx.quantization.gguf_grid import FORMATS
from lmx.quantization.ptq.gptq import column_updates, float_solver, gguf_solver
from lmx.quantization.ptq.gptq import solver as gptq_solver
from lmx.quantization.ptq.hessian import damped

GROUP, ROWS, LEVELS = 64, 50, 8.0
CONSTANTS = {
    "GROUP": GROUP,
    "SHRINKS": len(SHRINK_FACTORS),
    "ITERS": LEAST_SQUARES_ITERS,
}
ON_GPU = gpu_kernels.on_gpu()
DTYPES = {"float": mx.float32, "_Float16": mx.float16}
VIEWS = {"Slice", "Transpose", "Reshape", "Broadcast", "ExpandDims", "Squeeze"}


@pytest.fixture(autouse=True)
def expect_numpy(monkeypatch):
    """The functions that the kernels replace compute the expected values."""
    monkeypatch.setattr(gpu_kernels, "on_gpu", lambda: False)


def run_on_gpu(name, arrays, shapes, dtype="float", number=None, **constants):
    constants = CONSTANTS | dict(gpu_kernels._steps(number)) | constants
    template = [("T", DTYPES[dtype]), *constants.items()]
    arrays = [mx.array(np.asarray(a, np.float32)) for a in arrays]
    shapes = [shape if isinstance(shape, tuple) else (shape,) for shape in shapes]
    results = gpu_kernels._launch(name, arrays, template, shapes)
    return [np.array(result) for result in results]


@pytest.fixture(scope="module")
def run_kernel(tmp_path_factory):
    """A function that runs a kernel for every row."""
    if ON_GPU:
        return run_on_gpu
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("kernels")

    def run(name, arrays, shapes, dtype="float", number=None, **constants):
        inputs, outputs, body = gpu_kernels.KERNELS[name]
        source = "#include <math.h>\n"
        source += "#define FUNCTION static inline\n#define THREAD\n#define DEVICE\n"
        source += gpu_kernels.HELPERS + f"typedef {dtype} T;\n"
        constants = CONSTANTS | dict(gpu_kernels._steps(number)) | constants
        source += "".join(f"const int {k} = {v};\n" for k, v in constants.items())
        kinds = ["const int*" if n == "count" else "const float*" for n in inputs]
        kinds += ["float*"] * len(outputs)
        names = zip(kinds, inputs + outputs, strict=True)
        parameters = ", ".join(f"{kind} {name}" for kind, name in names)
        source += f'extern "C" void run({parameters}) {{\n'
        source += f"for (int n = 0; n < count[0]; n++) {{ {body} }} }}\n"
        file = folder / f"{name}_{dtype}_{number.bits if number else ''}.cpp"
        file.write_text(source)
        library = file.with_suffix(".so")
        command = ["g++", "-O1", "-shared", "-fPIC", "-Wall", "-Werror"]
        subprocess.run([*command, str(file), "-o", str(library)], check=True)
        arrays = [np.ascontiguousarray(a, np.float32) for a in arrays]
        arrays.append(np.array([ROWS], np.int32))
        results = [np.full(shape, np.nan, np.float32) for shape in shapes]
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (*arrays, *results)]
        ctypes.CDLL(str(library)).run(*pointers)
        return results

    return run


def random_rows(seed=0):
    """Rows of a group as columns [g, N]; a constant and a zero row among them."""
    rows = np.random.default_rng(seed).normal(size=(GROUP, ROWS)).astype(np.float32)
    rows[:, 0], rows[:, 1] = 0.25, 0
    return rows


def random_hessian(width=GROUP):
    x = np.random.default_rng(1).normal(size=(4 * width, width))
    x = x @ (np.eye(width) + 0.3 * np.random.default_rng(2).normal(size=(width, width)))
    return damped(mx.array(x.T @ x / len(x), mx.float32), GROUP, 0.01)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("float", mx.float32), ("_Float16", mx.float16)]
)
def test_fit_grid_kernel_equals_numpy(run_kernel, kind, dtype):
    rows = random_rows()
    cost = np.random.default_rng(3).uniform(0.1, 2, GROUP).astype(np.float32)
    inputs = [rows, cost, [LEVELS], SHRINK_FACTORS]
    scale, bias = run_kernel("fit_grid", inputs, [ROWS, ROWS], kind)
    expected = affine_grid.fit_grid(rows, cost, LEVELS, dtype)

    def errors(scale, bias):
        return affine_grid._error(rows, cost, scale, bias, LEVELS)

    assert np.allclose(errors(scale, bias), errors(*expected), rtol=1e-4, atol=1e-9)
    # Candidates with nearly equal errors may change places.
    assert np.isclose(scale, expected[0], rtol=1e-3).mean() > 0.9
    assert scale[1] == bias[1] == 0


@pytest.mark.parametrize("mode", ["q3_k", "q4_0", "q8_0"])
def test_fit_scale_kernel_equals_numpy(run_kernel, mode):
    rows, form = random_rows(), FORMATS[mode]
    cost = np.random.default_rng(3).uniform(0.1, 2, GROUP).astype(np.float32)
    constants = {
        "SHRINKS": len(gguf_solver.SHRINK_FACTORS),
        "ITERS": gguf_solver.LEAST_SQUARES_ITERS,
    }
    inputs = [rows, cost, [form.middle], gguf_solver.SHRINK_FACTORS]
    (scale,) = run_kernel("fit_scale", inputs, [ROWS], **constants)
    expected = gguf_solver.fit_scale(rows, cost, form)

    def errors(scale):
        codes = gguf_solver._centered_codes(rows, scale, form)
        return cost @ (rows - scale * codes) ** 2

    assert np.allclose(errors(scale), errors(expected), rtol=1e-4, atol=1e-9)
    # Candidates with nearly equal errors may change places.
    assert np.isclose(scale, expected, rtol=1e-3).mean() > 0.9
    assert min(scale) < 0 < max(scale)
    assert scale[1] == 0


def grid_of(rows, number):
    """Scale, bias, divisor and highest code of every row."""
    if number is None:
        low = rows.min(axis=0)
        scale = (rows.max(axis=0) - low) / (LEVELS - 1)
        return (scale, low, *affine_grid.safe_scale(scale, LEVELS))
    # The largest weights of every group are clipped.
    scale = np.maximum(abs(rows).max(axis=0), 1e-3) / number.max / 1.5
    return scale, 0 * scale, scale, 0 * scale + number.max


def round_(steps, top, number):
    if number:
        return number.nearest(steps.astype(np.float32), top)
    return np.minimum(np.rint(np.maximum(steps, 0)), top)


NUMBERS = pytest.mark.parametrize("number", [None, E2M1, E4M3])


@NUMBERS
def test_gptq_kernel_equals_numpy(run_kernel, number):
    rows, factor = random_rows(), np.array(random_hessian().factor)
    _, low, divisor, top = grid_of(rows, number)
    arrays = rows, factor, divisor, low, top
    codes, errors = run_kernel("gptq_columns", arrays, [rows.shape] * 2, number=number)
    expected_codes, expected_errors = column_updates.gptq_columns(*arrays, number)
    assert (codes == expected_codes).mean() > 0.999
    assert len(np.unique(codes)) > 7
    is_same = (codes == expected_codes).all(axis=0)
    assert np.allclose(errors[:, is_same], expected_errors[:, is_same], atol=1e-4)


@NUMBERS
def test_descent_kernel_equals_numpy(run_kernel, number):
    rows, matrix = random_rows(), np.array(random_hessian().matrix)
    scale, low, divisor, top = grid_of(rows, number)
    old = round_((rows - low) / divisor, top, number)
    descent = matrix @ random_rows(seed=4)
    arrays = descent, matrix, old, scale, divisor, top
    codes, changes = run_kernel(
        "descent_columns", arrays, [rows.shape] * 2, number=number
    )
    expected_codes, expected_changes = column_updates.descent_columns(*arrays, number)
    assert (codes != old).mean() > 0.2
    assert (codes == expected_codes).mean() > 0.999
    is_same = (codes == expected_codes).all(axis=0)
    assert np.allclose(changes[:, is_same], expected_changes[:, is_same], atol=1e-4)


def launches(array: mx.array, path) -> int:
    """Operations of an array that has not been computed, without views."""
    mx.export_to_dot(str(path), array)
    names = re.findall(r'label ="([A-Za-z]+)[^"]*", shape=rectangle', path.read_text())
    assert names
    return sum(name not in VIEWS for name in names)


@pytest.mark.parametrize("mode", ["affine", "nvfp4", "q4_0", "q4_k"])
def test_gptq_launches_few_kernels_for_a_group(mode, monkeypatch, tmp_path):
    """On a GPU. Each kernel is counted as two operations here."""
    hessian = random_hessian(4 * GROUP)
    target = mx.random.normal((ROWS, 4 * GROUP), key=mx.random.key(0))
    mx.eval(target, hessian.factor, hessian.matrix)

    def two_outputs(first, *_, **__):
        return first + 1, first + 2

    def fit(weight, *_, **__):
        return two_outputs(weight[0])

    def fit_scale(weight, *_, **__):
        return weight[0] + 1

    for module in (gptq_solver, float_solver, gguf_solver):
        monkeypatch.setattr(module, "async_eval", lambda arrays: None)
    for module in (backend, affine_grid, float_formats):
        monkeypatch.setattr(module, "on_cpu", lambda: False)

    def affine():
        grid = gptq_solver.gptq(target, hessian, GROUP, LEVELS, mx.float16)
        moved = gptq_solver.coordinate_descent(grid, target, hessian.matrix, LEVELS)
        return grid.codes, moved.codes

    def floating_point():
        grid = float_solver.float_gptq(target, hessian, QuantSpec(mode=mode))
        matrix = hessian.matrix
        moved = float_solver.group_descent(grid, target, matrix, MODES[mode])
        return grid.elements, moved.elements

    def gguf():
        form = FORMATS[mode]
        start = gguf_solver.fit_blocks(target, mx.diagonal(hessian.matrix), form)
        grid = gguf_solver.gguf_gptq(target, hessian, start, form)
        moved = gguf_solver.group_descent(grid, target, hessian.matrix, form)
        return start.codes, grid.codes, moved.codes

    def per_column():
        arrays = {"affine": affine, "nvfp4": floating_point}.get(mode, gguf)()
        counts = [launches(array, tmp_path / "graph.dot") for array in arrays]
        return [count / (4 * GROUP) for count in counts]

    without_kernels = per_column()
    monkeypatch.setattr(gpu_kernels, "on_gpu", lambda: True)
    monkeypatch.setattr(gpu_kernels, "_check", lambda *_: True)
    monkeypatch.setattr(gpu_kernels, "_is_right", {})
    monkeypatch.setattr(gpu_kernels, "fit_grid", fit)
    monkeypatch.setattr(gpu_kernels, "fit_scale", fit_scale)
    for name in ("gptq_columns", "descent_columns"):
        monkeypatch.setattr(gpu_kernels, name, two_outputs)
    with_kernels = per_column()
    assert min(without_kernels) > 9
    # Other modes have groups of 16 or 32 columns, and several candidates for a scale.
    assert max(with_kernels) < (0.25 if mode == "affine" else 6)
    fewer = zip(with_kernels, without_kernels, strict=True)
    assert all(8 * count < before for count, before in fewer)


def fails(*_):
    raise RuntimeError("[metal::Device] Unable to build")


BROKEN = {
    "wrong": lambda rows, *_: (rows * 0 + 7, rows * 0 + 7),
    "nan": lambda rows, *_: (rows * mx.nan, rows),
    "one": lambda rows, *_: (
        column_updates.gptq_columns.__wrapped__(rows, *_)[0],
        rows,
    ),
    "fails": fails,
}


@pytest.mark.parametrize("kind", [None, *BROKEN])
def test_a_broken_kernel_is_replaced_after_a_warning(kind, monkeypatch, recwarn):
    """A stand-in for a kernel, on a CPU."""
    rows, factor = mx.array(random_rows()), random_hessian().factor
    _, low, divisor, top = map(mx.array, grid_of(np.array(rows), None))
    arrays = rows, factor, divisor, low, top
    expected = column_updates.gptq_columns(*arrays)
    calls = []

    def kernel(*arguments):
        calls.append(arguments)
        return BROKEN.get(kind, column_updates.gptq_columns.__wrapped__)(*arguments)

    monkeypatch.setattr(gpu_kernels, "on_gpu", lambda: True)
    monkeypatch.setattr(gpu_kernels, "_is_right", {})
    monkeypatch.setattr(gpu_kernels, "gptq_columns", kernel)
    for _ in range(2):
        results = column_updates.gptq_columns(*arrays)
        for result, value in zip(results, expected, strict=True):
            np.testing.assert_array_equal(result, value)
    texts = [str(warning.message) for warning in recwarn]
    # Checked once; a right kernel is called again.
    assert len(calls) == (1 if kind else 3)
    assert len(texts) == (kind is not None)
    assert all("gptq_columns is not used" in text for text in texts)
    assert ("Unable to build" in "".join(texts)) == (kind == "fails")
