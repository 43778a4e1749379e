"""Sampling settings, and the filters of a distribution.

All filters apply to the model's own distribution, and a token must pass every filter.
The temperature is applied last. mlx-lm and LM Studio do the same, so equal settings
give equal distributions. (transformers divides by the temperature first and applies
top_p to the result of top_k.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import mlx.core as mx

from ..errors import UserError
from ..files.json_files import read_json

# Settings of generation_config.json.
SETTINGS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
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

    def with_seed_offset(self, number: int) -> Self:
        """These settings for request `number` of several, which share no noise."""
        return replace(self, seed=(self.seed + number) % 2**64)

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


def sampling_defaults(folder: Path) -> Sampling:
    """The sampling settings of a model's generation_config.json.

    The temperature is 1 if it has none, as everywhere but in mlx-lm.

    Raises:
        UserError: the file cannot be read, or a setting is no number or outside its
            range.
    """
    file = folder / "generation_config.json"
    values = read_json(file) if file.is_file() else {}
    given = {n: v for n in SETTINGS if (v := values.get(n)) is not None}
    for name, value in given.items():
        if type(value) not in (int, float):
            message = f"{name} is {str(value)[:40]}, not a number"
            raise UserError(message, place=str(file))
    try:
        return Sampling(**{"temperature": 1.0} | given)
    except UserError as error:
        raise UserError(error.message, place=str(file)) from error


UNCHANGED = Sampling(1.0)
"""Settings that leave a distribution as it is."""


def filter_logits(logits: mx.array, *samplings: Sampling) -> mx.array:
    """Filtered logits divided by the temperature, as float32 log-probabilities.

    They are unnormalized: logits [..., V] to [..., V], where removed tokens are -inf
    and the most likely token is exactly 0. It passes every filter, so at least one
    token is left. Greedy settings leave the distribution as it is.

    Settings are values of arrays: those of a request are no reason to compile.

    Args:
        samplings: of all rows, or one of each row of logits [M, V].
    """
    rows = [UNCHANGED if each.is_greedy else each for each in samplings]
    logits = logits.astype(mx.float32)
    logits = logits - mx.max(logits, axis=-1, keepdims=True)
    if any(s.min_p or s.top_k or s.top_p < 1 for s in rows):
        logits = mx.where(logits < _threshold(logits, rows), -mx.inf, logits)
    return logits / _column([each.temperature for each in rows])


def _column(values: list) -> mx.array:
    """A value for all rows [1], or one for each [M, 1]."""
    array = mx.array(values)
    return array if len(values) == 1 else array[:, None]


def _threshold(logits: mx.array, rows: Sequence[Sampling]) -> mx.array:
    """The smallest logit [..., 1] that passes all filters. The largest logit is 0."""
    threshold = _column([math.log(s.min_p) if s.min_p else -math.inf for s in rows])
    size = logits.shape[-1]
    sorts = [i for i, s in enumerate(rows) if s.top_p < 1 or 0 < s.top_k < size]
    if len(sorts) == len(rows):
        threshold = mx.maximum(threshold, _sorted_threshold(logits, rows))
    elif sorts:
        # Sorting takes longer than all the rest.
        index, some = mx.array(sorts), [rows[i] for i in sorts]
        part = _sorted_threshold(logits[index], some)
        threshold[index] = mx.maximum(threshold[index], part)
    return threshold


def _sorted_threshold(logits: mx.array, rows: Sequence[Sampling]) -> mx.array:
    """The smallest logit [..., 1] that passes top_k and top_p."""
    size = logits.shape[-1]
    top_k = [min(each.top_k or size, size) for each in rows]
    width = max(top_k)
    candidates = mx.topk(logits, width, axis=-1) if width < size else logits
    ascending = mx.sort(candidates, axis=-1)
    # A token passes if all tokens above it hold less than top_p in total.
    mass = mx.exp(ascending - mx.logsumexp(logits, axis=-1, keepdims=True))
    above = mx.cumsum(mass, axis=-1, reverse=True, inclusive=False)
    # 1 = all, also where the sum is more by rounding.
    top_p = _column([each.top_p if each.top_p < 1 else math.inf for each in rows])
    removed = (above >= top_p).sum(axis=-1, keepdims=True)
    removed = mx.clip(removed, width - _column(top_k), width - 1)
    return mx.take_along_axis(ascending, removed, axis=-1)


class LogitsProcessor:
    """Applies penalties, biases and the allowed-token mask of `Sampling` to logits.

    The token history is an array of counts [B, V] owned by the caller. So the next
    step can be launched before the last token is read, and draft tokens can be counted
    tentatively.

    Args:
        sampling: `logit_bias`, `allowed_tokens` and the penalties are used.
        vocab_size: width of the logits.

    Raises:
        UserError: a token id is outside the vocabulary.
    """

    def __init__(self, sampling: Sampling, vocab_size: int):
        self._sampling = sampling
        self._vocab_size = vocab_size
        tokens = [token for token, _ in sampling.logit_bias]
        tokens += sampling.allowed_tokens or ()
        if unknown := [token for token in tokens if not 0 <= token < vocab_size]:
            raise UserError(
                f"the model has no token {unknown[0]}: 0 to {vocab_size - 1}"
            )
        bias = [0.0] * vocab_size
        if sampling.allowed_tokens is not None:
            bias = [-float("inf")] * vocab_size
            for token in sampling.allowed_tokens:
                bias[token] = 0.0
        for token, value in sampling.logit_bias:
            bias[token] += value
        self._bias = mx.array(bias) if any(bias) else None

    @classmethod
    def create(cls, sampling: Sampling, vocab_size: int) -> "LogitsProcessor | None":
        """A processor for these settings; None if they leave the logits unchanged."""
        processor = cls(sampling, vocab_size)
        changes_logits = processor._bias is not None or sampling.has_penalties
        return processor if changes_logits else None

    def count_prompts(self, prompts: Sequence[Sequence[int]]) -> mx.array:
        """Token counts [B, V] of prompts [B][L]."""
        counts = mx.zeros((len(prompts), self._vocab_size))
        if not self._sampling.has_penalties:
            return counts
        for index, prompt in enumerate(prompts):
            counts[index] = counts[index].at[mx.array(prompt)].add(1.0)
        return counts

    def update(self, counts: mx.array, tokens: mx.array) -> mx.array:
        """Counts [B, V] after one more token [B] per sequence."""
        if not self._sampling.has_penalties:
            return counts
        return counts.at[mx.arange(len(tokens)), tokens].add(1.0)

    def __call__(self, logits: mx.array, counts: mx.array) -> mx.array:
        """Processed logits [B, V] in float32.

        The repetition penalty is CTRL's (arXiv 1909.05858). Presence and frequency
        penalties are subtracted.
        """
        sampling, logits = self._sampling, logits.astype(mx.float32)
        if sampling.has_penalties:
            penalty = sampling.repetition_penalty
            repeated = mx.where(logits < 0, logits * penalty, logits / penalty)
            logits = mx.where(counts > 0, repeated - sampling.presence_penalty, logits)
            logits = logits - sampling.frequency_penalty * counts
        return logits if self._bias is None else logits + self._bias
