"""2 bits without a zero: -3/4, -1/4, 1/4 and 3/4 of a learned alpha."""

from .symmetric import Symmetric


class Grid(Symmetric):
    """Alpha is two steps; the last code's 3 scale takes two bits more than a scale."""

    MIDDLE, SPARE = 1.5, 2
