"""Sampling settings, and the filters of a distribution.

All filters apply to the model's own distribution, and a token must pass every filter.
The temperature is applied last. mlx-lm and LM Studio do the same, so equal settings
give equal distributions. (transformers divides by the temperature first and applies
top_p to the result of top_k.)
"""

import math
from dataclasses import dataclass
from functools import reduce

import mlx.core as mx

from ..errors import UserError

MIN_TEMPERATURE = 1e-6  # below it, dividing by the temperature overflows float32


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of one request.

    Raises:
        UserError: a value is outside its range.
    """

    temperature: float = 0.0
    """0 = greedy; 1 = the model's own distribution."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with at least this probability."""
    top_k: int = 0
    """Keep the k most likely tokens, and tokens tied with the last one; 0 = all."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the most likely token's probability."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens in the prompt or completion; 1 = off."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens in the prompt or completion."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token and the value added to its logit."""
    allowed_tokens: tuple[int, ...] | None = None
    """The only tokens that may be sampled; None = all."""
    seed: int = 0
    """Equal seeds give equal samples."""

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on earlier tokens."""
        neutral = self.presence_penalty == self.frequency_penalty == 0
        return not neutral or self.repetition_penalty != 1

    def __post_init__(self):
        ranges = {
            "temperature": (0 <= self.temperature < math.inf, "0 or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "top_k": (self.top_k >= 0, "0 (all tokens) or more"),
            "min_p": (0 <= self.min_p <= 1, "between 0 and 1"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "above 0"),
            "presence_penalty": (math.isfinite(self.presence_penalty), "a number"),
            "frequency_penalty": (math.isfinite(self.frequency_penalty), "a number"),
            "allowed_tokens": (self.allowed_tokens != (), "at least one token"),
            "seed": (0 <= self.seed < 2**64, "between 0 and 2^64 - 1"),
        }
        for name, (is_valid, valid_range) in ranges.items():
            if not is_valid:
                value = getattr(self, name)
                raise UserError(f"{name} is {value}, but must be {valid_range}")


def filter_logits(logits: mx.array, sampling: Sampling) -> mx.array:
    """Filtered logits divided by the temperature, as float32 log-probabilities.

    They are unnormalized: logits [..., V] to [..., V], where removed tokens are -inf
    and the most likely token is exactly 0. It passes every filter, so at least one
    token is left.
    """
    logits = logits.astype(mx.float32)
    logits = logits - mx.max(logits, axis=-1, keepdims=True)
    threshold = _threshold(logits, sampling)
    if threshold is not None:
        logits = mx.where(logits < threshold, -mx.inf, logits)
    return logits / sampling.temperature


def _threshold(logits: mx.array, sampling: Sampling) -> mx.array | float | None:
    """The smallest logit [..., 1] that passes all filters. The largest logit is 0."""
    thresholds = []
    candidates = logits
    if 0 < sampling.top_k < logits.shape[-1]:
        candidates = mx.topk(logits, sampling.top_k, axis=-1)
        thresholds.append(mx.min(candidates, axis=-1, keepdims=True))
    if sampling.top_p < 1:
        # A token passes if all tokens above it hold less than top_p in total.
        ascending = mx.sort(candidates, axis=-1)
        mass = mx.exp(ascending - mx.logsumexp(logits, axis=-1, keepdims=True))
        above = mx.cumsum(mass, axis=-1, reverse=True, inclusive=False)
        removed = (above >= sampling.top_p).sum(axis=-1, keepdims=True)
        thresholds.append(mx.take_along_axis(ascending, removed, axis=-1))
    if sampling.min_p > 0:
        thresholds.append(math.log(sampling.min_p))
    return reduce(mx.maximum, thresholds) if thresholds else None
