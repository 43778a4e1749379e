"""Statistics of speculative decoding."""

from dataclasses import dataclass, field

from .draft_length import DraftLengthController


@dataclass
class StandardSteps:
    """Steps without a draft: those left before the next draft, and those timed."""

    left: int = 0
    count: int = 0
    seconds: float = 0.0


@dataclass
class SpeculativeStats:
    """Statistics of speculative decoding.

    Attributes:
        rounds: verifications of at least one draft token.
        standard_tokens: tokens decoded without a draft.
        proposed, accepted: number of draft tokens per position. A draft token counts
            only if all draft tokens before it were accepted.
        seconds: time of all rounds and timed standard steps.
        standard_seconds: time that their tokens take without drafts.
    """

    rounds: int = 0
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
