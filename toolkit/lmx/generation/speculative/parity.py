"""Where speculative greedy text is not what plain decoding would have said.

Rounding differs between a forward pass of one token and one of many, so two tokens of
nearly the same logit can change places (a flip). More than that would be a fault.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..decode_loop import prefill
from ..kv_cache import CacheState
from ..sampling import Sampling
from .proposer import TargetSampler

ROUNDING_MARGIN = 0.25
"""Difference of logits up to which a flip can come from rounding alone."""


@dataclass(frozen=True)
class TokenMismatch:
    """A token that plain decoding, at the same place, would not have said.

    Attributes:
        place: of the token in the answer, from 0.
        margin: logit of the best token less that of the second, of the row alone.
        in_top_two: whether what was said is one of these.
    """

    position: int
    token: int
    expected: int
    margin: float
    in_top_two: bool

    @property
    def is_rounding(self) -> bool:
        """Whether rounding alone explains it."""
        return self.in_top_two and self.margin <= ROUNDING_MARGIN


@dataclass(frozen=True)
class ParityReport:
    """An answer beside plain decoding, token by token."""

    tokens: int
    mismatches: list[TokenMismatch]

    def to_json(self) -> dict:
        """For reports; `first_mismatch` is where both texts part."""
        first = vars(self.mismatches[0]) if self.mismatches else None
        return {
            "tokens": self.tokens,
            "mismatches": len(self.mismatches),
            "mismatches_per_1000": 1000 * len(self.mismatches) / max(1, self.tokens),
            "first_mismatch": first,
            "all_from_rounding": all(flip.is_rounding for flip in self.mismatches),
        }


def check_parity(
    session: CacheState,
    prompt: Sequence[int],
    said: Sequence[int],
    sampling: Sampling,
    *,
    prefill_step_size: int = 512,
) -> ParityReport:
    """Decode plainly along an answer: every row of logits is computed singly.

    Args:
        session: fresh.
        sampling: greedy, perhaps with penalties.
    """
    assert sampling.is_greedy
    assert not session.length
    flips, choice, before = [], None, prompt[-1]
    prefill(session, mx.array([prompt[:-1]], mx.int32), width=prefill_step_size)
    for place, token in enumerate(said):
        logits = session.forward(mx.array([[before]], mx.int32))[:, -1]
        choice = choice or TargetSampler(sampling, prompt, logits.shape[-1])
        logits = choice.logits(logits, choice.counts)[0]
        best = mx.argmax(logits).item()
        if best != token:
            flips.append(_flip(place, token, best, logits))
        choice.counts = choice.after(choice.counts, mx.array([token], mx.int32))
        before = token
    return ParityReport(len(said), flips)


def _flip(place: int, said: int, best: int, logits: mx.array) -> TokenMismatch:
    second, first = mx.sort(logits)[-2:].tolist()
    is_second = logits[said].item() >= second
    return TokenMismatch(place, said, best, first - second, is_second)
