"""The largest logits of a large vocabulary."""

import mlx.core as mx

# Values of a block. Those of a model's vocabulary are few blocks of the largest ones.
BLOCK = 64


def top_k_indices(values: mx.array, k: int) -> mx.array:
    """Indices of the k largest values [..., V] along the last axis, int [..., k].

    They are in no order. The k largest values lie in the k blocks with the largest
    maxima, so only these are partitioned: 8 times faster than all of 49,152 values on a
    CPU.
    """
    size = values.shape[-1]
    if k * BLOCK >= size:
        return _partition(values, k)
    padding = [(0, 0)] * (values.ndim - 1) + [(0, -size % BLOCK)]
    blocks = mx.unflatten(
        mx.pad(values, padding, constant_values=-mx.inf), -1, (-1, BLOCK)
    )
    largest = _partition(blocks.max(axis=-1), k)
    candidates = mx.take_along_axis(blocks, largest[..., None], axis=-2).flatten(-2)
    places = _partition(candidates, k)
    numbers = mx.take_along_axis(largest, places // BLOCK, axis=-1)
    return numbers * BLOCK + places % BLOCK


def _partition(values: mx.array, k: int) -> mx.array:
    return mx.argpartition(values, -k, axis=-1)[..., -k:]
