"""Calibration batches for tests."""

import numpy as np
from lmx.data.calibration import CalibrationBatch


def windows_of(tokens, counted=None) -> CalibrationBatch:
    """Return a batch of tokens [n, L]. Without `counted`, every position counts."""
    tokens = np.array(tokens, np.int32)
    return CalibrationBatch(
        tokens, np.ones(tokens.shape, bool) if counted is None else counted
    )
