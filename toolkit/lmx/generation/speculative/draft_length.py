"""Adaptive draft length: the number of draft tokens with the most tokens per second.

Verification is not free: on many machines a forward pass over four tokens takes much
longer than over one. The controller therefore uses the measured time of every kind of
round and the measured acceptance rate at every draft position.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

# Decay of the acceptance counts per round.
DECAY = 0.97
# Accepted draft tokens assumed at every position at the start, out of twice as many.
PRIOR = 1.0
# Measurements needed before a mean time is used; the first one is a warm-up.
MIN_MEASUREMENTS = 3
# Maximum share of the time spent on trying draft lengths that do not pay off.
EXPLORATION_BUDGET = 0.02
FIRST_ROUNDS = 16
"""Rounds of a fixed length in a batch before steps without drafts are timed."""
FIRST_STANDARD_STEPS, STANDARD_STEPS = 4, 16
"""Steps without a draft in a row, while their time is not known (few, so that short
requests get drafts), and then when the draft length is 0."""
RETRY_STEPS = 1, 2, 3, 3
"""Steps without a draft after the first, second, ... try in a row that gave no draft
tokens. Each try adds a step that is not launched ahead: a cycle of 13 tokens, a prime
number, so that a text with a shorter period is tried at every place of it."""


@dataclass
class EMATimer:
    """Exponential moving average of seconds. The first measurement is ignored."""

    count: int = 0
    mean: float = 0.0

    def add(self, seconds: float) -> None:
        """Add a measurement."""
        self.count += 1
        if self.count == 2:
            self.mean = seconds
        elif self.count > 2:
            # Clip slow outliers: they are caused by other processes.
            self.mean += 0.1 * (min(seconds, 4 * self.mean) - self.mean)

    @property
    def is_known(self) -> bool:
        """Whether there are enough measurements."""
        return self.count > MIN_MEASUREMENTS


@dataclass
class DraftLengthController:
    """Chooses the number of draft tokens of every round.

    Args:
        max_draft_tokens: largest draft length.
        fixed: use this draft length; None = adapt, and allow 0.
        may_rest: a fixed length is 0 while drafts lose time.

    Attributes:
        standard: seconds per token of standard decoding.
        rounds: seconds per round, by draft length.
        accepted, proposed: decayed counts by draft position.
        seconds, lost: total time, and time lost against standard decoding.
    """

    max_draft_tokens: int = 8
    fixed: int | None = None
    may_rest: bool = False
    standard: EMATimer = field(default_factory=EMATimer)
    rounds: dict[int, EMATimer] = field(default_factory=dict)
    accepted: list[float] = field(default_factory=list)
    proposed: list[float] = field(default_factory=list)
    seconds: float = 0.0
    lost: float = 0.0

    def __post_init__(self):
        self.max_draft_tokens = max(self.max_draft_tokens, self.fixed or 0)
        self.accepted = [PRIOR] * self.max_draft_tokens
        self.proposed = [2 * PRIOR] * self.max_draft_tokens

    def like(self) -> Self:
        """A new controller with these settings, for a batch."""
        return type(self)(self.max_draft_tokens, self.fixed, may_rest=True)

    @property
    def acceptance_rates(self) -> list[float]:
        """Acceptance rate by position, given that all positions before are accepted."""
        return [a / b for a, b in zip(self.accepted, self.proposed, strict=True)]

    def expected_tokens(self, num_draft_tokens: int) -> float:
        """Expected tokens of a round, including the target's own token."""
        total = all_accepted = 1.0
        for rate in self.acceptance_rates[:num_draft_tokens]:
            all_accepted *= rate
            total += all_accepted
        return total

    def round_seconds(self, num_draft_tokens: int) -> float | None:
        """Seconds of a round; None = not measured and no measurement to scale."""
        if not num_draft_tokens:
            return self.standard.mean if self.standard.is_known else None
        known = {k: timer.mean for k, timer in self.rounds.items() if timer.is_known}
        if num_draft_tokens in known or not known or not self.standard.is_known:
            return known.get(num_draft_tokens)
        # Scale the extra time of the nearest measured draft length.
        near = min(known, key=lambda k: (abs(k - num_draft_tokens), k))
        extra = (known[near] - self.standard.mean) * num_draft_tokens / near
        return self.standard.mean + extra

    def next_length(self) -> int:
        """The draft length of the next round; 0 = use standard decoding for a while."""
        if self.fixed is not None:
            pays = self.lost < EXPLORATION_BUDGET * self.seconds
            if not self.standard.is_known:
                rounds = sum(timer.count for timer in self.rounds.values())
                pays = rounds < FIRST_ROUNDS
            return self.fixed if pays or not self.may_rest else 0
        if not self.standard.is_known:
            return 0
        first = min(2, self.max_draft_tokens)
        if not any(timer.is_known for timer in self.rounds.values()):
            return first
        best = max(range(self.max_draft_tokens + 1), key=self._tokens_per_second)
        # If drafting is off, try it again when the exploration budget allows it.
        if best == 0 and self.lost < EXPLORATION_BUDGET * self.seconds:
            return first
        return best

    def predicted_speedup(self, num_draft_tokens: int) -> float | None:
        """Predicted tokens per second, relative to standard decoding."""
        seconds, standard = self.round_seconds(num_draft_tokens), self.round_seconds(0)
        if not seconds or not standard:
            return None
        return self.expected_tokens(num_draft_tokens) * standard / seconds

    def record_standard(self, tokens: int, seconds: float) -> None:
        """Add a measurement of standard decoding."""
        self.standard.add(seconds / tokens)
        self.seconds += seconds

    def record_round(
        self, drafted: Sequence[int], accepted: Sequence[int], seconds: float
    ) -> None:
        """Add a measurement of a round.

        Args:
            drafted, accepted: numbers of draft tokens of every row, at least one of
                them not 0.
        """
        self.rounds.setdefault(max(drafted), EMATimer()).add(seconds)
        self.seconds += seconds
        # Time gained by drafting pays for exploration.
        tokens = 1 + sum(accepted) / len(accepted)
        if self.standard.is_known:
            self.lost = max(0.0, self.lost + seconds - tokens * self.standard.mean)
        for num_draft_tokens, num_accepted in zip(drafted, accepted, strict=True):
            self._record_row(num_draft_tokens, num_accepted)

    def _record_row(self, num_draft_tokens: int, num_accepted: int) -> None:
        for position in range(min(num_accepted + 1, num_draft_tokens)):
            is_accepted = position < num_accepted
            self.accepted[position] = DECAY * self.accepted[position] + is_accepted
            self.proposed[position] = DECAY * self.proposed[position] + 1
        # Long drafts are rare, so later positions also learn from the one before.
        for position in range(num_accepted + 1, self.max_draft_tokens):
            if num_draft_tokens:
                self.accepted[position] += 0.1 * self.acceptance_rates[position - 1]
                self.proposed[position] += 0.1

    def _tokens_per_second(self, num_draft_tokens: int) -> float:
        seconds = self.round_seconds(num_draft_tokens)
        return self.expected_tokens(num_draft_tokens) / seconds if seconds else 0.0


@dataclass
class SpeculativeStats:
    """Statistics of speculative decoding.

    Attributes:
        rounds: verifications of at least one draft token.
        drafted: draft tokens of all rounds.
        standard_tokens: tokens decoded without a draft.
        proposed, accepted: number of draft tokens per position. A draft token counts
            only if all draft tokens before it were accepted.
        seconds: time of all rounds and timed standard steps.
        standard_seconds: time that their tokens take without drafts.
    """

    rounds: int = 0
    drafted: int = 0
    standard_tokens: int = 0
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    seconds: float = 0.0
    standard_seconds: float = 0.0
    predicted_speedup: float | None = None
    measured_speedup: float | None = None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted share of the draft tokens whose predecessors were accepted."""
        return sum(self.accepted) / sum(self.proposed) if self.proposed else None

    @property
    def acceptance_rate_by_position(self) -> list[float]:
        """The acceptance rate at every draft position, given all before it."""
        pairs = zip(self.accepted, self.proposed, strict=True)
        return [accepted / total if total else 0.0 for accepted, total in pairs]

    @property
    def accepted_length(self) -> float | None:
        """Mean tokens per round: the accepted draft tokens plus the target's token."""
        if not self.rounds:
            return None
        return (sum(self.accepted) + self.rounds) / self.rounds

    def add_round(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Count one verification."""
        self.rounds += 1
        self.drafted += num_draft_tokens
        verified = min(num_accepted + 1, num_draft_tokens)
        for counts, number in (self.proposed, verified), (self.accepted, num_accepted):
            counts.extend([0] * (num_draft_tokens - len(counts)))
            for position in range(number):
                counts[position] += 1

    def add_time(
        self, tokens: float, seconds: float, controller: DraftLengthController
    ) -> None:
        """Count the time of rounds or standard steps.

        Args:
            tokens: of every row, on average.
        """
        if not controller.standard.is_known:
            return
        self.seconds += seconds
        self.standard_seconds += tokens * controller.standard.mean
        self.measured_speedup = self.standard_seconds / self.seconds
        lengths = [k for k, timer in controller.rounds.items() if timer.is_known]
        speedups = [controller.predicted_speedup(k) for k in lengths]
        self.predicted_speedup = max([s for s in speedups if s], default=None)

    def merge(self, other: "SpeculativeStats") -> None:
        """Add the counts of another completion. Times are not added."""
        self.rounds += other.rounds
        self.standard_tokens += other.standard_tokens
        for counts, others in (
            (self.proposed, other.proposed),
            (self.accepted, other.accepted),
        ):
            counts.extend([0] * (len(others) - len(counts)))
            for position, number in enumerate(others):
                counts[position] += number

    def to_json(self) -> dict:
        """The statistics for reports."""
        return {
            "rounds": self.rounds,
            "standard_tokens": self.standard_tokens,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_rate_by_position": self.acceptance_rate_by_position,
            "accepted_length": self.accepted_length,
            "predicted_speedup": self.predicted_speedup,
            "speedup": self.measured_speedup,
        }


class DraftPlanner:
    """Decides when the rows of a batch get draft tokens, and how many.

    Args:
        controller: for one row; batches get their own like it.

    Attributes:
        stats: counts of what happened.
        agree: the seconds to learn from, in place of those that were measured.
    """

    def __init__(self, controller: DraftLengthController):
        self.stats = SpeculativeStats()
        self.agree: Callable[[float], float] = lambda seconds: seconds
        self._controllers = {1: controller}
        # Steps without a draft: those left before the next one, and those timed.
        self._left = self._count = 0
        self._seconds = 0.0
        self._misses = 0  # tries in a row without draft tokens

    def length(self, rows: int) -> int:
        """Draft tokens of each of so many rows; 0 = a step without a draft."""
        return self._controller(rows).next_length()

    def tries(self, rows: int, *, has_draft: bool) -> bool:
        """Whether this step may be a round. If not, some others are none either.

        Args:
            has_draft: whether a row was given its draft tokens already.
        """
        if self._left > 0:
            return False
        if has_draft or self.length(rows):
            return True
        is_known = self._controller(rows).standard.is_known
        self._rest(STANDARD_STEPS if is_known else FIRST_STANDARD_STEPS)
        return False

    def found(self, has_drafts: bool) -> None:
        """Whether a try gave a draft token. If not, some steps do not try."""
        if has_drafts:
            self._misses = 0
        else:
            self._rest(RETRY_STEPS[self._misses])
            self._misses = (self._misses + 1) % len(RETRY_STEPS)

    def joined(self) -> None:
        """The times so far are those of fewer rows."""
        self._rest(self._left)

    def time_step(self, rows: int, seconds: float) -> None:
        """Time a step without a draft."""
        self._count, self._seconds = self._count + 1, self._seconds + seconds
        self._left -= 1
        if self._left <= 0:
            controller, seconds = self._controller(rows), self.agree(self._seconds)
            controller.record_standard(self._count, seconds)
            self.stats.add_time(self._count, seconds, controller)

    def time_round(
        self, drafted: Sequence[int], accepted: Sequence[int], seconds: float
    ) -> None:
        """Count and time a round with these numbers of draft tokens by row."""
        for num_draft_tokens, num_accepted in zip(drafted, accepted, strict=True):
            if num_draft_tokens:
                self.stats.add_round(num_draft_tokens, num_accepted)
            else:
                self.stats.standard_tokens += 1
        controller, seconds = self._controller(len(drafted)), self.agree(seconds)
        controller.record_round(drafted, accepted, seconds)
        tokens = 1 + sum(accepted) / len(accepted)
        self.stats.add_time(tokens, seconds, controller)

    def _rest(self, steps: int) -> None:
        self._left, self._count, self._seconds = steps, 0, 0.0

    def _controller(self, rows: int) -> DraftLengthController:
        """The controller for a number of rows, in powers of two."""
        size = 1 << (rows - 1).bit_length()
        if size not in self._controllers:
            self._controllers[size] = self._controllers[1].like()
        return self._controllers[size]
