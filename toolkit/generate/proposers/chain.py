"""Several proposers, the cheapest first."""

from collections.abc import Sequence

from ..proposal import NOTHING, Choice, Proposal, Proposer


class Chain:
    """Asks one proposer after the other until one has a guess."""

    def __init__(self, *proposers: Proposer):
        self._proposers = proposers

    def propose(self, context: Sequence[int], count: int, choice: Choice) -> Proposal:
        """The first guess that is not empty."""
        for proposer in self._proposers:
            if len(proposal := proposer.propose(context, count, choice)):
                return proposal
        return NOTHING
