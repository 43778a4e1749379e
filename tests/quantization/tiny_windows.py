"""Windows of tokens that a test has made."""

import numpy as np
from lmx.data.calibration import CalibrationBatch


def windows_of(tokens, counted=None) -> CalibrationBatch:
    """Of tokens [n, L]; counted absent = every position counts."""
    tokens = np.array(tokens, np.int32)
    return CalibrationBatch(
        tokens, np.ones(tokens.shape, bool) if counted is None else counted
    )
