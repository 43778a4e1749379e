"""How many tokens to guess: as many as this machine and this text reward.

A verified guess is not free: on many machines a forward pass of four rows takes much
longer than one of a single row. So what is chosen each round is the number of guesses
with most tokens per second, by the measured time of a round and the measured share of
guesses that stand at every place.
"""

from dataclasses import dataclass, field

# Weight of what was measured before, round by round.
MEMORY = 0.97
# Guesses that stand, before any was seen: so many, of twice as many.
PRIOR = 1.0
# Rounds of one length that are needed to trust their time; the first one warms up.
TRIALS = 3
# Share of the time that may be lost by trying out lengths that do not pay.
PRICE = 0.02


@dataclass
class EMATimer:
    """A moving average of seconds; the first measurement is a warm-up and not in it."""

    count: int = 0
    mean: float = 0.0

    def add(self, seconds: float) -> None:
        """Measure once more."""
        self.count += 1
        if self.count == 2:
            self.mean = seconds
        elif self.count > 2:
            # A machine is never too fast: what is much slower is somebody else's work.
            self.mean += 0.1 * (min(seconds, 4 * self.mean) - self.mean)

    @property
    def is_known(self) -> bool:
        """Whether the average can be trusted."""
        return self.count > TRIALS


@dataclass
class DraftLengthController:
    """Chooses the number of guesses of every round.

    Args:
        max_draft_tokens: guesses at most.
        fixed: always so many; None = the best by measurement, 0 included.
    """

    max_draft_tokens: int = 8
    fixed: int | None = None
    plain: EMATimer = field(default_factory=EMATimer)
    rounds: dict[int, EMATimer] = field(default_factory=dict)
    stood: list[float] = field(default_factory=list)
    tried: list[float] = field(default_factory=list)
    seconds: float = 0.0
    lost: float = 0.0

    def __post_init__(self):
        self.stood = [PRIOR] * self.max_draft_tokens
        self.tried = [2 * PRIOR] * self.max_draft_tokens

    @property
    def rates(self) -> list[float]:
        """Share of guesses that stand where all before them do, place by place."""
        return [a / b for a, b in zip(self.stood, self.tried, strict=True)]

    def tokens(self, count: int) -> float:
        """Tokens of a round with `count` guesses, expected."""
        total = standing = 1.0
        for rate in self.rates[:count]:
            standing *= rate
            total += standing
        return total

    def time(self, count: int) -> float | None:
        """Seconds of a round with `count` guesses; None = nothing near it is known."""
        if not count:
            return self.plain.mean if self.plain.is_known else None
        known = {k: t.mean for k, t in self.rounds.items() if t.is_known}
        if count in known or not known or not self.plain.is_known:
            return known.get(count)
        # The cost of a guess is taken from the measured length next to it.
        near = min(known, key=lambda k: (abs(k - count), k))
        return self.plain.mean + (known[near] - self.plain.mean) * count / near

    def length(self) -> int:
        """How many tokens to guess now; 0 = none, and decode plainly for a while."""
        if self.fixed is not None:
            return self.fixed
        if not self.plain.is_known:
            return 0
        first = min(2, self.max_draft_tokens)
        if not any(times.is_known for times in self.rounds.values()):
            return first
        best = max(range(self.max_draft_tokens + 1), key=self._rate)
        # Parked, it looks again once it can be paid.
        if best == 0 and self.lost < PRICE * self.seconds:
            return first
        return best

    def speedup(self, count: int) -> float | None:
        """Predicted tokens per second with so many guesses, as a multiple of plain."""
        time, plain = self.time(count), self.time(0)
        return self.tokens(count) * plain / time if time and plain else None

    def record_plain(self, tokens: int, seconds: float) -> None:
        """Plain decoding of some tokens took so long."""
        self.plain.add(seconds / tokens)
        self.seconds += seconds

    def record_round(self, guessed: int, stood: int, seconds: float) -> None:
        """A round with `guessed` > 0 guesses, of which `stood` stood, took so long."""
        self.rounds.setdefault(guessed, EMATimer()).add(seconds)
        self.seconds += seconds
        # What guessing gains pays for trying.
        self.lost = max(0.0, self.lost + seconds - (stood + 1) * self.plain.mean)
        for place in range(min(stood + 1, guessed)):
            self.stood[place] = MEMORY * self.stood[place] + (place < stood)
            self.tried[place] = MEMORY * self.tried[place] + 1
        # Long guesses are rare: what is before them tells of them, too.
        for place in range(stood + 1, self.max_draft_tokens):
            self.stood[place] += 0.1 * self.rates[place - 1]
            self.tried[place] += 0.1

    def _rate(self, count: int) -> float:
        time = self.time(count)
        return self.tokens(count) / time if time else 0.0
