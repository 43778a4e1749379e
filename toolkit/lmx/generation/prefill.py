"""The prompts that a step processes: several short ones in one pass of the model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .kv_cache.prefix import PrefixCache
from .sequence import RunningSequence

PASS_TOKENS = 32
"""What a pass costs beside its tokens, in tokens, because it reads all weights. (Two
CPU cores need 14 ms for one token, and .45 ms for another; a GPU has a larger ratio.)
"""


@dataclass(frozen=True)
class PrefillPass:
    """Prompts that are processed in one pass of the model.

    Attributes:
        ends: how far each is processed. The last token is left to decoding.
        waits: the pass is long and nothing else runs, so its memory is freed at once.
    """

    sequences: Sequence[RunningSequence]
    ends: Sequence[int]
    waits: bool = False


class PrefillGroup:
    """The requests whose prompts end in this step.

    Args:
        prefix_cache: stores their prompts; None = it has none.
        budget: tokens that the step may process, with padding.
        max_width: the most tokens of a row in a pass with padding. A function, because
            its first call runs the model.

    Attributes:
        sequences: all of them, in order.
        pending: those that are in no pass yet.
        budget: what the others have left.
    """

    def __init__(
        self,
        prefix_cache: PrefixCache | None,
        budget: int,
        max_width: Callable[[], int],
    ):
        self.prefix_cache, self.budget = prefix_cache, budget
        self._max_width = max_width
        self.sequences: list[RunningSequence] = []
        self.pending: list[RunningSequence] = []

    @property
    def left(self) -> int:
        """The budget without the pending requests."""
        return self.budget - self._cost(self.pending)

    def equal(self, sequence: RunningSequence) -> RunningSequence | None:
        """The first of these requests with the same tokens and adapter, if any."""
        return next((s for s in self.sequences if s.has_prompt_of(sequence)), None)

    def saves(self, sequence: RunningSequence) -> bool:
        """Whether a request should wait until the pending ones are processed.

        It has more in common with them than another pass costs, and will find that in
        the prefix cache.
        """
        if self.prefix_cache is None or not self.pending or sequence.state:
            return False
        if sequence.scores_prompt:
            return False
        tokens, adapter = sequence.tokens, sequence.adapter
        end = self.prefix_cache.match(tokens, adapter) + PASS_TOKENS + 1
        return len(tokens) >= end and any(
            s.adapter == adapter and s.tokens[:end] == tokens[:end]
            for s in self.pending
        )

    def takes(self, sequence: RunningSequence) -> bool:
        """Whether the prompt of a request can end in this step."""
        state, cut = sequence.state, max(sequence.matched, sequence.selected_at)
        is_cut = state is not None and state.length < cut
        return not is_cut and self._cost([*self.pending, sequence]) <= self.budget

    def add(self, sequence: RunningSequence) -> None:
        """Add a request. It has a state, or its tokens are those of another one."""
        self.sequences.append(sequence)
        self.pending.append(sequence)

    def passes(self) -> Iterator[PrefillPass]:
        """The passes of all pending requests, which have caches afterwards.

        Those with equal tokens share one: it must be copied before it is used.
        """
        self.budget = self.left
        for each in self._passes(self.pending):
            yield PrefillPass(each, [len(sequence.tokens) - 1 for sequence in each])
        for sequence in self.pending:
            sequence.state = sequence.state or self.equal(sequence).state
        self.pending = []

    def _cost(self, sequences: Sequence[RunningSequence]) -> int:
        """Tokens with padding; those of one token still take some time."""
        widths = [_rest(each[0]) for each in self._passes(sequences) for _ in each]
        return sum(widths) + len(sequences) - len(widths)

    def _passes(
        self, sequences: Sequence[RunningSequence]
    ) -> list[list[RunningSequence]]:
        """The requests of every pass, the longest one first.

        A request joins a pass if that pads it by less than a pass of its own costs.
        """
        passes: list[list[RunningSequence]] = []
        waiting = [s for s in sequences if s.state and _rest(s)]
        for sequence in sorted(waiting, key=_rest, reverse=True):
            width = _rest(passes[-1][0]) if passes else 0
            is_close = width - _rest(sequence) < PASS_TOKENS
            if passes and is_close and width <= self._max_width():
                passes[-1].append(sequence)
            else:
                passes.append([sequence])
        return passes


def _rest(sequence: RunningSequence) -> int:
    """Tokens of the prompt to process; the last one is left to decoding."""
    return len(sequence.tokens) - 1 - sequence.state.length
