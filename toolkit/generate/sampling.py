"""Choosing the next token: the most likely one, or a draw from a filtered distribution.

Every filter is judged on the model's own distribution and a token must pass them all;
the temperature comes last. That is what mlx-lm and LM Studio do, so the same settings
mean the same distribution there. (transformers divides by the temperature first and
applies top_p to what top_k has left.)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from ..errors import UserError

Sampler = Callable[[mx.array], mx.array]

COLDEST = 1e-6  # below it, dividing by the temperature overflows float32


@dataclass(frozen=True)
class Sampling:
    """How to choose a token.

    Raises:
        UserError: a value outside its range.
    """

    temperature: float = 0.0
    """0 = always the most likely token; 1 = the model's own distribution."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens that hold this much probability together."""
    top_k: int = 0
    """Keep so many of the most likely tokens, and those tied with the last; 0 = all."""
    min_p: float = 0.0
    """Keep tokens at least this probable, as a share of the most likely token's."""
    seed: int = 0
    """The same seed draws the same tokens."""

    def __post_init__(self):
        ranges = {
            "temperature": (0 <= self.temperature < math.inf, "0 or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "top_k": (self.top_k >= 0, "0 (all tokens) or more"),
            "min_p": (0 <= self.min_p <= 1, "between 0 and 1"),
            "seed": (0 <= self.seed < 2**64, "between 0 and 2^64 - 1"),
        }
        for name, (holds, allowed) in ranges.items():
            if not holds:
                value = getattr(self, name)
                raise UserError(f"{name} is {value}, but must be {allowed}")


def make_sampler(sampling: Sampling) -> Sampler:
    """A function from logits [B, V] to tokens [B].

    It counts its calls: the n-th draw depends on the seed and n alone, never on MLX's
    global random state. Make a new one for every generation.
    """
    if sampling.temperature < COLDEST:
        return lambda logits: mx.argmax(logits, axis=-1)
    key = mx.random.key(sampling.seed)

    def draw(logits: mx.array) -> mx.array:
        nonlocal key
        key, now = mx.random.split(key)
        return mx.random.categorical(filtered(logits, sampling), key=now)

    return draw


def filtered(logits: mx.array, sampling: Sampling) -> mx.array:
    """The distribution to draw from, as unnormalised float32 log-probabilities.

    Logits [..., V] to [..., V]: removed tokens are -inf, the most likely is exactly 0.
    It passes every filter, so something is always left.
    """
    logits = logits.astype(mx.float32)
    logits = logits - mx.max(logits, axis=-1, keepdims=True)
    kept = logits
    if 0 < sampling.top_k < logits.shape[-1]:
        kept = _cut(kept, logits, _top_k_threshold(logits, sampling.top_k))
    if sampling.top_p < 1:
        kept = _cut(kept, logits, _top_p_threshold(logits, sampling.top_p))
    if sampling.min_p > 0:
        kept = _cut(kept, logits, math.log(sampling.min_p))
    return kept / sampling.temperature


def _cut(kept: mx.array, logits: mx.array, threshold: mx.array | float) -> mx.array:
    return mx.where(logits < threshold, -mx.inf, kept)


def _top_k_threshold(logits: mx.array, k: int) -> mx.array:
    return mx.min(mx.topk(logits, k, axis=-1), axis=-1, keepdims=True)


def _top_p_threshold(logits: mx.array, p: float) -> mx.array:
    """The least logit kept: a token stays while those above it hold less than p."""
    ascending = mx.sort(logits, axis=-1)
    mass = mx.softmax(ascending, axis=-1)
    above = mx.cumsum(mass, axis=-1, reverse=True, inclusive=False)
    removed = (above >= p).sum(axis=-1, keepdims=True)
    return mx.take_along_axis(ascending, removed, axis=-1)
