"""One arithmetic for two libraries: NumPy on a CPU, MLX on a GPU.

What goes column by column is thousands of small operations. On a CPU NumPy starts one
in a tenth of the time that MLX takes.
"""

from collections.abc import Callable
from functools import wraps
from types import ModuleType

import mlx.core as mx

from ..cpu import on_cpu


def library(array) -> ModuleType:
    """The one whose array this is."""
    return mx if isinstance(array, mx.array) else _numpy()


def _numpy() -> ModuleType:
    # What reads recipes comes by here, and is to begin at once.
    import numpy

    return numpy


def to_fast_backend(array: mx.array):
    """A float32 array for the library that is faster here, its rows side by side.

    It may share its memory: it is only read.
    """
    array = mx.contiguous(array)
    return _numpy().asarray(array) if on_cpu() else array


def compiled(function: Callable) -> Callable:
    """Let MLX compile what is called with its arrays."""
    fused = mx.compile(function)

    @wraps(function)
    def call(*arrays, **named):
        chosen = fused if library(arrays[0]) is mx else function
        return chosen(*arrays, **named)

    return call


def round_to_dtype(array, dtype: mx.Dtype):
    """The nearest values that a type has, in float32."""
    if dtype == mx.float32:
        return array
    its = library(array)
    if its is mx:
        return array.astype(dtype).astype(mx.float32)
    if dtype == mx.float16:
        return array.astype(its.float16).astype(its.float32)
    assert dtype == mx.bfloat16, dtype
    # The upper half of the bits, rounded to the nearest, to even ones between two.
    bits = array.view(its.uint32)
    bits = bits + 0x7FFF + (bits >> 16 & 1)
    return (bits & its.uint32(0xFFFF0000)).view(its.float32)
