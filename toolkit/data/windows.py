"""Windows of tokens to watch a model on: documents joined and cut."""

import random
from collections.abc import Iterable
from itertools import islice

import numpy as np

from ..errors import UserError
from .shapes import Row
from .template import encode_block

# Rows that are chosen from, the first ones of the source.
CHOICE, BLOCK = 20_000, 100


def windows(
    rows: Iterable[Row], tokenizer, *, length: int, tokens: int, seed: int
) -> np.ndarray:
    """Whole documents in random order, joined and cut into windows.

    Args:
        tokens: that many, or what the rows have, rounded down to whole windows.

    Returns:
        int32 [n, length].

    Raises:
        UserError: the rows do not fill one window.
    """
    chosen = list(islice(rows, CHOICE))
    random.Random(seed).shuffle(chosen)
    wanted = max(1, tokens // length) * length
    found: list[np.ndarray] = []
    for start in range(0, len(chosen), BLOCK):
        block = chosen[start : start + BLOCK]
        # Longer than any, so that no document is cut by itself.
        encoded = encode_block(
            block, tokenizer, max_length=1 << 40, train_on="everything"
        )
        found += [example.tokens for example in encoded.examples]
        if sum(map(len, found)) >= wanted:
            break
    joined = np.concatenate(found or [np.zeros(0, np.int32)])
    count = min(len(joined), wanted) // length
    if count == 0:
        raise UserError(
            f"there are {len(joined)} tokens to calibrate on, fewer than one window of "
            f"{length}",
            hint="give calibration another source, or a smaller length",
        )
    return joined[: count * length].reshape(count, length)
