"""Means per token, with errors that allow for dependence within a sequence."""

from math import sqrt

import numpy as np


def mean_over_sequences(sums: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Mean per token, and its standard error with sequences as clusters.

    Args:
        sums: over the tokens of each sequence.
        counts: tokens of each sequence; empty sequences are ignored.
    """
    mean = sums.sum() / counts.sum()
    size = np.count_nonzero(counts)
    spread = np.sum((sums - mean * counts)[counts > 0] ** 2)
    stderr = sqrt(spread * size / max(1, size - 1)) / counts.sum()
    return float(mean), float(stderr)
