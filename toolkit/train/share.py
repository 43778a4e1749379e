"""A process's rows of a batch, when several train together."""

import mlx.core as mx

from ..data.batches import Batch
from ..run.ranks import Ranks


def share(batch: Batch, ranks: Ranks) -> Batch:
    """Every `size`-th row of a batch; as many for every process.

    Who has a row less than others gets one whose mask is empty.
    """
    if ranks.size == 1:
        return batch
    arrays = [value if value is None else _rows(value, ranks) for value in batch.arrays]
    where = tuple(ranks.own(batch.where))
    target = batch.target and tuple(_rows(value, ranks) for value in batch.target)
    return Batch(arrays[0], arrays[1], where, arrays[2], target=target)


def _rows(values: mx.array, ranks: Ranks) -> mx.array:
    rows = values[ranks.rank :: ranks.size]
    missing = -(-len(values) // ranks.size) - len(rows)
    return mx.pad(rows, [(0, missing), *[(0, 0)] * (rows.ndim - 1)])
