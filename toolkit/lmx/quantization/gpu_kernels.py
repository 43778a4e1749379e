"""The steps of GPTQ within a group of columns, as one GPU kernel each.

A thread takes one row of the weight through all columns of the group. In MLX's own
functions, the same takes several kernels for every column. The bodies are plain C that
Metal, CUDA and a C++ compiler understand; the tests run them with the latter. The first
call of a kernel is checked against the functions that it replaces.
"""

import warnings
from collections.abc import Callable
from functools import cache, wraps
from math import ceil
from typing import Any

import mlx.core as mx

from ..models.float_formats import FloatFormat

# Threads that share their registers: each needs a few hundred bytes for its group.
THREADS = 64
# Differences of a right kernel: another order of sums makes other choices between
# candidates that are nearly as good, in less than this share of the values.
TOLERANCE, SHARE = 1e-3, 0.1

METAL = """
#define FUNCTION inline
#define THREAD thread
#define DEVICE device
"""
CUDA = """
#define FUNCTION __device__ inline
#define THREAD
#define DEVICE
"""
METAL_INDEX = "int n = thread_position_in_grid.x;"
CUDA_INDEX = "int n = blockIdx.x * blockDim.x + threadIdx.x;"
GUARD = "if (n >= count[0]) return;"

HELPERS = """
template <typename T> FUNCTION float rounded(float x) {
    return static_cast<float>(static_cast<T>(x));
}

FUNCTION float magnitude(float x) { return x < 0 ? -x : x; }

FUNCTION float nearest_code(float steps, float top) {
    steps = steps > 0 ? steps : 0;
    return rint(steps < top ? steps : top);
}

// `FloatFormat.nearest` if an interval from one power of two to the next has STEPS
// values, FINEST of the smallest steps being 1. No STEPS: codes are integers.
template <int STEPS, int FINEST> FUNCTION float nearest(float value, float top) {
    if (STEPS == 0) return nearest_code(value, top);
    value = value < -top ? -top : value > top ? top : value;
    float step = 1.0f / FINEST;
    while (magnitude(value) >= 2 * STEPS * step) step *= 2;
    return rint(value / step) * step;
}

FUNCTION float centered_code(float steps, float middle) {
    return nearest_code(steps + middle, 2 * middle - 1) - middle;
}

// A scale of 0 gives codes of 0.
FUNCTION float divisor_of(float scale) { return scale == 0 ? 1 : scale; }
FUNCTION float top_of(float scale, float levels) {
    return scale == 0 ? 0 : levels - 1;
}

template <int GROUP> FUNCTION float grid_error(
    THREAD const float* row, DEVICE const float* cost, float scale, float bias,
    float levels) {
    float divisor = divisor_of(scale), top = top_of(scale, levels), total = 0;
    for (int i = 0; i < GROUP; i++) {
        float steps = (row[i] - bias) / divisor;
        float error = steps - nearest_code(steps, top);
        total += cost[i] * error * error;
    }
    return total * divisor * divisor;
}
"""

# `affine_grid.fit_grid`.
FIT_GRID = """
float row[GROUP], total_cost = 0, mean = 0;
float low = weight[n], high = low;
for (int i = 0; i < GROUP; i++) {
    row[i] = weight[i * count[0] + n];
    low = row[i] < low ? row[i] : low;
    high = row[i] > high ? row[i] : high;
    total_cost += cost[i];
    mean += cost[i] * row[i];
}
mean /= total_cost;
float full_scale = rounded<T>((high - low) / (levels[0] - 1));
float best_scale = full_scale, best_bias = rounded<T>(low);
float best = grid_error<GROUP>(row, cost, best_scale, best_bias, levels[0]);
for (int candidate = 0; candidate < SHRINKS + ITERS; candidate++) {
    float next_scale, next_bias;
    if (candidate < SHRINKS) {
        next_scale = shrink[candidate] * full_scale;
        next_bias = shrink[candidate] * low;
    } else {
        // Least squares for the codes of the best grid.
        float divisor = divisor_of(best_scale), top = top_of(best_scale, levels[0]);
        float mean_code = 0, variance = 0, covariance = 0;
        for (int i = 0; i < GROUP; i++)
            mean_code += cost[i] * nearest_code((row[i] - best_bias) / divisor, top);
        mean_code /= total_cost;
        for (int i = 0; i < GROUP; i++) {
            float code = nearest_code((row[i] - best_bias) / divisor, top) - mean_code;
            variance += cost[i] * code * code;
            covariance += cost[i] * code * (row[i] - mean);
        }
        next_scale = variance == 0 ? best_scale : covariance / variance;
        next_bias = mean - next_scale * mean_code;
    }
    next_scale = rounded<T>(next_scale);
    next_bias = rounded<T>(next_bias);
    float error = grid_error<GROUP>(row, cost, next_scale, next_bias, levels[0]);
    if (error < best) {
        best = error;
        best_scale = next_scale;
        best_bias = next_bias;
    }
}
scale[n] = best_scale;
bias[n] = best_bias;
"""

# `gguf_solver.fit_scale`.
FIT_SCALE = """
float row[GROUP], low = weight[n], high = low, middle = center[0];
for (int i = 0; i < GROUP; i++) {
    row[i] = weight[i * count[0] + n];
    low = row[i] < low ? row[i] : low;
    high = row[i] > high ? row[i] : high;
}
float full = (magnitude(low) > magnitude(high) ? low : high) / -middle;
float best_scale = full, best = 0;
for (int candidate = 0; candidate < 2 * SHRINKS + ITERS; candidate++) {
    float next = (candidate % 2 ? -1 : 1) * full;
    if (candidate < 2 * SHRINKS) {
        next *= shrink[candidate / 2];
    } else {
        // Least squares for the codes of the best scale.
        float divisor = divisor_of(best_scale), squares = 0, products = 0;
        for (int i = 0; i < GROUP; i++) {
            float code = centered_code(row[i] / divisor, middle);
            squares += cost[i] * code * code;
            products += cost[i] * code * row[i];
        }
        next = products / divisor_of(squares);
    }
    float divisor = divisor_of(next), error = 0;
    for (int i = 0; i < GROUP; i++) {
        float miss = row[i] - next * centered_code(row[i] / divisor, middle);
        error += cost[i] * miss * miss;
    }
    if (candidate == 0 || error < best) {
        best = error;
        best_scale = next;
    }
}
scale[n] = best_scale;
"""

# `column_updates.gptq_strip`, for a whole group.
GPTQ_COLUMNS = """
float steps[GROUP];
for (int i = 0; i < GROUP; i++)
    steps[i] = (rows[i * count[0] + n] - bias[n]) / scale[n];
for (int i = 0; i < GROUP; i++) {
    float code = nearest<STEPS, FINEST>(steps[i], top[n]);
    float error = (steps[i] - code) / factor[i * GROUP + i];
    codes[i * count[0] + n] = code;
    errors[i * count[0] + n] = error * scale[n];
    for (int j = i + 1; j < GROUP; j++) steps[j] -= factor[i * GROUP + j] * error;
}
"""

# `column_updates.descent_strip`, for a whole group.
DESCENT_COLUMNS = """
float steps[GROUP];
for (int i = 0; i < GROUP; i++)
    steps[i] = descent[i * count[0] + n] / divisor[n] / matrix[i * GROUP + i];
for (int i = 0; i < GROUP; i++) {
    float old = old_codes[i * count[0] + n];
    float code = nearest<STEPS, FINEST>(old + steps[i], top[n]);
    codes[i * count[0] + n] = code;
    changes[i * count[0] + n] = (code - old) * scale[n];
    for (int j = i + 1; j < GROUP; j++)
        steps[j] -= matrix[i * GROUP + j] / matrix[j * GROUP + j] * (code - old);
}
"""

# Name: inputs, outputs and body.
KERNELS = {
    "fit_grid": (
        ["weight", "cost", "levels", "shrink", "count"],
        ["scale", "bias"],
        FIT_GRID,
    ),
    "fit_scale": (
        ["weight", "cost", "center", "shrink", "count"],
        ["scale"],
        FIT_SCALE,
    ),
    "gptq_columns": (
        ["rows", "factor", "scale", "bias", "top", "count"],
        ["codes", "errors"],
        GPTQ_COLUMNS,
    ),
    "descent_columns": (
        ["descent", "matrix", "old_codes", "scale", "divisor", "top", "count"],
        ["codes", "changes"],
        DESCENT_COLUMNS,
    ),
}


def on_gpu() -> bool:
    """Whether MLX computes on a GPU, where these kernels run."""
    return mx.default_device().type == mx.gpu


def on_gpu_by(name: str, **settings: Any) -> Callable:
    """Decorator: on a GPU, a function of this module computes what the decorated one
    does, if its first result for such arguments is the same.

    Args:
        settings: keyword arguments of the function of this module alone.

    Returns:
        The decorator; `kernel` of the decorated function is the function of this
        module, and `__wrapped__` the plain one.
    """

    def kernel(*arguments: Any) -> Any:
        return globals()[name](*arguments, **settings)

    def decorate(plain: Callable) -> Callable:
        @wraps(plain)
        def call(*arguments: Any) -> Any:
            if not on_gpu():
                return plain(*arguments)
            # What the source of the kernel depends on.
            kinds = (a for a in arguments[1:] if not isinstance(a, mx.array))
            key = name, arguments[0].shape[0], *map(repr, kinds)
            if key not in _is_right:
                _is_right[key] = _check(name, plain, kernel, arguments)
            return (kernel if _is_right[key] else plain)(*arguments)

        call.kernel = kernel
        return call

    return decorate


# By kernel and kind of its arguments.
_is_right: dict[tuple, bool] = {}


def _check(name: str, plain: Callable, kernel: Callable, arguments: tuple) -> bool:
    """Whether a kernel runs and agrees with the plain operations; else warn."""
    try:
        found = kernel(*arguments)
        mx.eval(found)
    except (RuntimeError, ValueError) as error:
        reason = f"it fails with: {error}"
    else:
        share = share_of_differences(plain(*arguments), found)
        if share <= SHARE:
            return True
        reason = f"{share:.0%} of its values are wrong"
    warnings.warn(
        f"the GPU kernel {name} is not used, because {reason}. The same operations of "
        "MLX replace it; quantization is slower.",
        stacklevel=4,
    )
    return False


def share_of_differences(expected: Any, found: Any) -> float:
    """The share of wrong values in the output that has most: of a right kernel, at most
    `SHARE`."""
    outputs = (x if isinstance(x, tuple) else (x,) for x in (expected, found))
    shares = []
    for right, other in zip(*outputs, strict=True):
        limit = TOLERANCE * mx.abs(right).max()
        # A NaN is no number within the limit.
        shares.append(1 - (mx.abs(right - other) <= limit).mean().item())
    return max(shares)


def fit_grid(
    weight: mx.array,
    cost: mx.array,
    levels: float,
    dtype: mx.Dtype,
    *,
    shrink_factors: tuple[float, ...],
    iterations: int,
) -> tuple[mx.array, mx.array]:
    """`affine_grid.fit_grid` in one kernel."""
    inputs, template = _search(weight, cost, levels, shrink_factors, iterations)
    shapes = [weight.shape[1:]] * 2
    scale, bias = _launch("fit_grid", inputs, [("T", dtype), *template], shapes)
    return scale, bias


def fit_scale(
    weight: mx.array,
    cost: mx.array,
    form: Any,
    *,
    shrink_factors: tuple[float, ...],
    iterations: int,
) -> mx.array:
    """`gguf_solver.fit_scale` of a `BlockFormat` in one kernel."""
    inputs, template = _search(weight, cost, form.middle, shrink_factors, iterations)
    (scale,) = _launch("fit_scale", inputs, template, [weight.shape[1:]])
    return scale


def _search(
    weight: mx.array, cost: mx.array, number: float, shrink_factors, iterations: int
) -> tuple[list[mx.array], list[tuple[str, int]]]:
    """Inputs and template of a search for the scale of a group."""
    inputs = [weight, cost, mx.array([number], mx.float32), mx.array(shrink_factors)]
    sizes = len(weight), len(shrink_factors), iterations
    return inputs, [*zip(("GROUP", "SHRINKS", "ITERS"), sizes, strict=True)]


def gptq_columns(
    rows: mx.array,
    factor: mx.array,
    scale: mx.array,
    bias: mx.array,
    top: mx.array,
    number: FloatFormat | None = None,
) -> tuple[mx.array, mx.array]:
    """Codes and errors [g, N] of a group; see `column_updates.gptq_columns`."""
    inputs = [rows, factor, scale, *_by_row(scale, bias, top)]
    template = [("GROUP", len(rows)), *_steps(number)]
    codes, errors = _launch("gptq_columns", inputs, template, [rows.shape] * 2)
    return codes, errors


def descent_columns(
    descent: mx.array,
    matrix: mx.array,
    old_codes: mx.array,
    scale: mx.array,
    divisor: mx.array,
    top: mx.array,
    number: FloatFormat | None = None,
) -> tuple[mx.array, mx.array]:
    """Codes and changes [g, N]; see `column_updates.descent_columns`."""
    inputs = [descent, matrix, old_codes, scale, divisor, *_by_row(scale, top)]
    template = [("GROUP", len(descent)), *_steps(number)]
    codes, changes = _launch("descent_columns", inputs, template, [descent.shape] * 2)
    return codes, changes


def _by_row(scale: mx.array, *values) -> list[mx.array]:
    """Values that all rows share, or each has, as one per row."""
    return [
        mx.broadcast_to(mx.array(value, mx.float32), scale.shape) for value in values
    ]


def _steps(number: FloatFormat | None) -> list[tuple[str, int]]:
    """What `nearest` of the kernels has to know about a number."""
    if number is None:
        return [("STEPS", 0), ("FINEST", 1)]
    steps = 2**number.fraction_bits
    return [("STEPS", steps), ("FINEST", int(steps / number.min_normal))]


def _launch(
    name: str, inputs: list[mx.array], template: list, shapes: list[tuple[int, ...]]
) -> list[mx.array]:
    count = shapes[0][-1]
    return _kernel(name)(
        inputs=[*inputs, mx.array([count], mx.int32)],
        template=template,
        grid=(THREADS * ceil(count / THREADS), 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=shapes,
        output_dtypes=[mx.float32] * len(shapes),
    )


@cache
def _kernel(name: str):
    inputs, outputs, body = KERNELS[name]
    on_metal = mx.metal.is_available()
    make = mx.fast.metal_kernel if on_metal else mx.fast.cuda_kernel
    return make(
        name=f"lmx_{name}",
        input_names=inputs,
        output_names=outputs,
        header=(METAL if on_metal else CUDA) + HELPERS,
        source="\n".join((METAL_INDEX if on_metal else CUDA_INDEX, GUARD, body)),
    )
