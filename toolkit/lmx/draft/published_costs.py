"""The speed-up of a draft on other machines, from published costs of their passes.

A pass of a target over several positions costs more than one position, and the more so
the smaller the memory bandwidth is against the arithmetic: see the sources.
"""

from collections.abc import Sequence

import numpy as np

# Positions of a pass, and its time in units of a pass over one position.
PUBLISHED_PASSES = {
    # ml-explore/mlx#3839: layers of Qwen3-8B, 4 bits, `qmv_wide`.
    "M4 Pro, 8B, 4 bits": ((1, 2, 3, 4, 6, 8), (1, 1.11, 1.31, 1.45, 1.98, 2.45)),
    # ml-explore/mlx#3791: a whole model.
    "M5 Max, 70B, 4 bits": ((1, 3, 5, 8), (1, 1.11, 1.42, 2.2)),
}


def computed_speedups(
    accepted_lengths: Sequence[float], draft_share: float, *, in_one_pass: bool
) -> dict[str, float]:
    """The speed-up with the best number of draft tokens, by machine.

    Reading the weights is all that a pass of the draft is taken to cost.

    Args:
        accepted_lengths: mean tokens per round with 1, 2, ... draft tokens.
        draft_share: bytes of the draft, in units of the target's.
        in_one_pass: all draft tokens of a round take one pass of the draft.
    """
    counts = np.arange(1, len(accepted_lengths) + 1)
    drafting = draft_share * (1 if in_one_pass else counts)
    return {
        machine: float(
            np.max(accepted_lengths / (np.interp(counts + 1, *passes) + drafting))
        )
        for machine, passes in PUBLISHED_PASSES.items()
    }
