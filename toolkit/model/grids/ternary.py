"""Three levels, -1, 0 and 1 of a learned number, in 2 bits: the last code is unused."""

from .symmetric import Symmetric


class Grid(Symmetric):
    """All levels are the scale itself, or twice it less it."""

    MIDDLE, SPARE = 1.0, 0
