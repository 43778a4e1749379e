"""Parity check: compare speculative greedy output with standard decoding.

A forward pass over many tokens rounds differently from one over a single token, so two
tokens with nearly equal logits can swap. Any larger difference is an error.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..generation.kv_cache.sequence import CacheState
from ..generation.sampler import Sampler
from ..generation.sampling import Sampling

ROUNDING_MARGIN = 0.25
"""Largest difference of logits that rounding alone can explain."""
PREFILL_STEP_SIZE = 512


@dataclass(frozen=True)
class TokenMismatch:
    """A token that differs from the one of standard decoding at the same position.

    Attributes:
        position: index of the token in the completion, from 0.
        margin: difference of the two largest logits in standard decoding.
        in_top_two: whether the token is one of these two.
    """

    position: int
    token: int
    expected: int
    margin: float
    in_top_two: bool

    @property
    def is_rounding(self) -> bool:
        """Whether rounding alone explains the difference."""
        return self.in_top_two and self.margin <= ROUNDING_MARGIN


@dataclass(frozen=True)
class ParityReport:
    """The result of a parity check over `tokens` tokens."""

    tokens: int
    mismatches: list[TokenMismatch]

    def to_json(self) -> dict:
        """The result for reports."""
        first = vars(self.mismatches[0]) if self.mismatches else None
        return {
            "tokens": self.tokens,
            "mismatches": len(self.mismatches),
            "mismatches_per_1000": 1000 * len(self.mismatches) / max(1, self.tokens),
            "first_mismatch": first,
            "all_from_rounding": all(m.is_rounding for m in self.mismatches),
        }


def check_parity(
    cache: CacheState,
    prompt: Sequence[int],
    completion: Sequence[int],
    sampling: Sampling,
) -> ParityReport:
    """Compare a completion with standard decoding, one forward pass per token.

    Args:
        cache: empty.
        sampling: greedy, possibly with penalties.
    """
    assert sampling.is_greedy
    assert not cache.length
    mismatches, sampler, previous = [], None, prompt[-1]
    cache.prefill(mx.array([prompt[:-1]], mx.int32), step_size=PREFILL_STEP_SIZE)
    cache.end_prompt()
    for position, token in enumerate(completion):
        logits = cache.forward(mx.array([[previous]], mx.int32))[:, -1]
        sampler = sampler or Sampler(sampling, prompt, logits.shape[-1])
        logits = sampler.process(logits, sampler.counts)[0]
        expected = mx.argmax(logits).item()
        if expected != token:
            second, first = mx.sort(logits)[-2:].tolist()
            in_top_two = logits[token].item() >= second
            mismatches.append(
                TokenMismatch(position, token, expected, first - second, in_top_two)
            )
        sampler.advance(mx.array([token], mx.int32))
        previous = token
    return ParityReport(len(completion), mismatches)
