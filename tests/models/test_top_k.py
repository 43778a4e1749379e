"""The largest values of a large vocabulary are found by blocks."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.models.top_k import BLOCK, top_k_indices


@pytest.mark.parametrize(
    ("size", "k"),
    [(BLOCK, 3), (50 * BLOCK, 7), (50 * BLOCK + 1, 7), (20 * BLOCK - 5, 20)],
    ids=["one block", "blocks", "a part of a block", "more than the blocks"],
)
@pytest.mark.parametrize("place", ["anywhere", "one block"])
def test_they_are_those_of_a_sorted_row(size, k, place):
    rng = np.random.default_rng(size)
    values = rng.permutation(2 * size).reshape(2, 1, size).astype(np.float32)
    if place == "one block":
        values[..., -k:] += 3 * size
    found = np.array(top_k_indices(mx.array(values), k))
    expected = np.argsort(-values, axis=-1)[..., :k]
    np.testing.assert_array_equal(np.sort(found), np.sort(expected))
