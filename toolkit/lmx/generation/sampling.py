"""Choosing the next token: the most likely one, or a draw from a filtered distribution.

Every filter is judged on the model's own distribution and a token must pass them all;
the temperature comes last. That is what mlx-lm and LM Studio do, so the same settings
mean the same distribution there. (transformers divides by the temperature first and
applies top_p to what top_k has left.)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, reduce

import mlx.core as mx

from ..errors import UserError

Sampler = Callable[[mx.array], mx.array]

MIN_TEMPERATURE = 1e-6  # below it, dividing by the temperature overflows float32


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
    repetition_penalty: float = 1.0
    """Divides the logits of tokens already said, in the prompt too; 1 = off."""
    presence_penalty: float = 0.0
    """Is subtracted from the logits of tokens already said."""
    frequency_penalty: float = 0.0
    """Is subtracted as often as a token was said."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token and what is added to its logit."""
    allowed: tuple[int, ...] | None = None
    """The only tokens that may be chosen; None = all."""
    seed: int = 0
    """The same seed draws the same tokens."""

    @property
    def is_greedy(self) -> bool:
        """Whether always the most likely token is chosen."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def penalises(self) -> bool:
        """Whether what was said matters."""
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
            "allowed": (self.allowed != (), "at least one token"),
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
    if sampling.is_greedy:
        return lambda logits: mx.argmax(logits, axis=-1)
    key = mx.random.key(sampling.seed)
    step = _compiled(replace(sampling, seed=0))

    def draw(logits: mx.array) -> mx.array:
        nonlocal key
        token, key = step(logits, key)
        return token

    return draw


@lru_cache(maxsize=16)  # mx.compile never forgets a trace: one per setting, not per use
def _compiled(sampling: Sampling) -> Callable:
    def step(logits: mx.array, key: mx.array) -> tuple[mx.array, mx.array]:
        key, now = mx.random.split(key)
        return mx.random.categorical(filter_logits(logits, sampling), key=now), key

    return mx.compile(step)


def filter_logits(logits: mx.array, sampling: Sampling) -> mx.array:
    """The distribution to draw from, as unnormalised float32 log-probabilities.

    Logits [..., V] to [..., V]: removed tokens are -inf, the most likely is exactly 0.
    It passes every filter, so something is always left.
    """
    logits = logits.astype(mx.float32)
    logits = logits - mx.max(logits, axis=-1, keepdims=True)
    threshold = _threshold(logits, sampling)
    if threshold is not None:
        logits = mx.where(logits < threshold, -mx.inf, logits)
    return logits / sampling.temperature


def _threshold(logits: mx.array, sampling: Sampling) -> mx.array | float | None:
    """The least logit [..., 1] that passes; the largest logit is 0."""
    limits = []
    candidates = logits
    if 0 < sampling.top_k < logits.shape[-1]:
        candidates = mx.topk(logits, sampling.top_k, axis=-1)
        limits.append(mx.min(candidates, axis=-1, keepdims=True))
    if sampling.top_p < 1:
        # A token stays while those above it hold less than top_p of the whole.
        ascending = mx.sort(candidates, axis=-1)
        mass = mx.exp(ascending - mx.logsumexp(logits, axis=-1, keepdims=True))
        above = mx.cumsum(mass, axis=-1, reverse=True, inclusive=False)
        removed = (above >= sampling.top_p).sum(axis=-1, keepdims=True)
        limits.append(mx.take_along_axis(ascending, removed, axis=-1))
    if sampling.min_p > 0:
        limits.append(math.log(sampling.min_p))
    return reduce(mx.maximum, limits) if limits else None
