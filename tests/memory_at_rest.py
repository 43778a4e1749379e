"""MLX's memory before a peak is measured."""

import gc

import mlx.core as mx


def active_memory() -> int:
    """Bytes in use, without what earlier tests left; the peak begins here."""
    gc.collect()
    # The thread of the CPU stream holds the arrays of its last task for a moment.
    mx.synchronize()
    mx.reset_peak_memory()
    return mx.get_active_memory()
