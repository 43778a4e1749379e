"""Windows of tokens that a test has made."""

import numpy as np

from toolkit.data.windows import Windows


def windows_of(tokens, counted=None) -> Windows:
    """Of tokens [n, L]; counted absent = every position counts."""
    tokens = np.array(tokens, np.int32)
    return Windows(tokens, np.ones(tokens.shape, bool) if counted is None else counted)
