"""Compile the kernels that quantization, training and generation need, one by one.

MLX compiles a kernel when it first needs it: on CUDA this takes up to a minute. Each
line has the count, the name and the seconds. Compiled kernels serve later runs.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import mlx.core as mx
from lmx import cpu
from lmx.config.quant_spec import FLOAT_MODES
from lmx.quantization.affine_grid import fit_grid
from lmx.quantization.gguf_grid import FORMATS
from lmx.quantization.ptq.gptq import column_updates, gguf_solver

WIDTH, ROWS, GROUPS = 256, 128, (64, 32)
DTYPES = (mx.float32, mx.bfloat16, mx.float16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="one of each kind")
    is_short = parser.parse_args().short
    cpu.enable()
    kernels = list(_kernels())
    if is_short:
        kernels = list(
            {name.split()[0]: (name, make) for name, make in kernels}.values()
        )
    failures = []
    for number, (name, make) in enumerate(kernels, 1):
        start = time.perf_counter()
        try:
            mx.eval(make())
        except (RuntimeError, ValueError) as error:
            failures.append(name)
            name += f": {error}"
        seconds = time.perf_counter() - start
        print(f"{number}/{len(kernels)} {name}: {seconds:.1f} s", flush=True)
    if failures:
        sys.exit(f"{len(failures)} failed: {', '.join(failures)}")


def _kernels() -> Iterator[tuple[str, Any]]:
    """Names, whose first word is the kind, and functions."""
    for dtype in DTYPES:
        x = mx.random.normal((1, 4, ROWS, 64), key=mx.random.key(0)).astype(dtype)
        w = mx.random.normal((WIDTH, WIDTH), key=mx.random.key(1)).astype(dtype)
        yield f"product {dtype}", partial(mx.matmul, w, w)
        yield f"softmax {dtype}", partial(mx.softmax, x)
        yield f"norm {dtype}", partial(mx.fast.rms_norm, w, w[0], 1e-5)
        yield f"rope {dtype}", partial(_rope, x)
        yield f"attention {dtype}", partial(_attention, x)
        yield f"fused {dtype}", partial(mx.compile(_fused), w)
        yield f"gradient {dtype}", partial(mx.grad(lambda a: _fused(a).sum()), w)
        grids = [
            *({"bits": b, "group_size": g} for b, g in product((2, 3, 4, 8), GROUPS)),
            *({"mode": mode} for mode in FLOAT_MODES),
        ]
        for grid in grids:
            words = " ".join(map(str, grid.values()))
            for rows in (1, ROWS):
                yield (
                    f"quantized {dtype} {words}, {rows} rows",
                    partial(_quantized, w, rows, grid),
                )
    for group in GROUPS:
        rows = mx.random.normal((group, ROWS), key=mx.random.key(2))
        factor = mx.eye(group) + 0.01
        scale = mx.full(ROWS, 0.1)
        columns = rows, factor, scale, 0 * scale - 1, 0 * scale + 15
        old = mx.zeros_like(rows)
        yield f"gptq_columns {group}", partial(column_updates.gptq_columns, *columns)
        yield (
            f"descent_columns {group}",
            partial(
                column_updates.descent_columns,
                *(rows, factor, old, scale, scale, 0 * scale + 15),
            ),
        )
        for dtype in DTYPES:
            yield (
                f"fit_grid {group} {dtype}",
                partial(fit_grid, rows, mx.ones(group), 16.0, dtype),
            )
    rows = mx.random.normal((32, ROWS), key=mx.random.key(3))
    yield (
        "fit_scale",
        partial(gguf_solver.fit_scale, rows, mx.ones(32), FORMATS["q4_0"]),
    )


def _fused(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x) + mx.exp(-mx.abs(x))


def _rope(x: mx.array) -> mx.array:
    settings = {"traditional": False, "base": 1e4, "scale": 1.0, "offset": 0}
    return mx.fast.rope(x, 64, **settings)


def _attention(x: mx.array) -> mx.array:
    return mx.fast.scaled_dot_product_attention(x, x, x, scale=0.1, mask="causal")


def _quantized(w: mx.array, rows: int, grid: dict) -> tuple[mx.array, mx.array]:
    codes = mx.quantize(w, **grid)
    product = mx.quantized_matmul(w[:rows], *codes, transpose=True, **grid)
    return product, mx.dequantize(*codes, **grid)


if __name__ == "__main__":
    main()
