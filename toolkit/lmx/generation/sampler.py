"""Samples of requests that depend on nothing but their own text and seed.

A sample is the argmax of the logits plus Gumbel noise, and the noise depends on the
seed and the position only. So a request gets the same tokens alone, among other
requests, and with draft tokens: a draft token is accepted when it equals the sample
(drafter-invariant speculative decoding, arXiv 2408.07978). Draft models use the same
noise, which makes them agree with the target as often as their distributions allow.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from .sampling import LogitsProcessor, Sampling, filter_logits


class Sampler:
    """Samples the tokens of one request.

    Args:
        sampling: settings of the request.
        context: tokens of the prompt, for the penalties.
        vocab_size: rows of the target's LM head.

    Attributes:
        counts: occurrences [1, V] of every token so far; empty without penalties.
        seed: uint32 [2], of the noise.
    """

    def __init__(self, sampling: Sampling, context: Sequence[int], vocab_size: int):
        self.sampling = sampling
        self.vocab_size = vocab_size
        self._processor = LogitsProcessor.create(sampling, vocab_size)
        self.counts = mx.zeros((1, 0))
        if self._processor:
            self.counts = self._processor.count_prompts([context])
        self.seed = np.random.SeedSequence(sampling.seed).generate_state(2)

    @property
    def has_counts(self) -> bool:
        """Whether `counts` or a bias change the logits."""
        return self._processor is not None

    def sample(
        self,
        logits: mx.array,
        positions: Sequence[int],
        counts: mx.array | None = None,
    ) -> mx.array:
        """Tokens int32 [k] at positions.

        Args:
            logits: [k, W]. The LM head of a draft model may have more or fewer rows
                than the target's (padding): tokens that are not in both are never
                sampled.
            positions: k of them, counted from the start of the prompt.
            counts: [k, V], for the penalties; None = those of the sampler.
        """
        logits = self._process(logits, self.counts if counts is None else counts)
        return _sample([self], logits, [positions])

    def process(self, logits: mx.array, counts: mx.array | None = None) -> mx.array:
        """Logits [k, W] of a model as float32 [k, V], softmax = what is sampled from.

        Arguments are those of `sample`.
        """
        logits = self._process(logits, self.counts if counts is None else counts)
        return filter_logits(logits, self.sampling)

    def advance(self, tokens: mx.array) -> None:
        """Count the tokens [k] that were chosen."""
        self.counts = self.counts_after(self.counts, tokens)

    def counts_after(self, counts: mx.array, tokens: mx.array) -> mx.array:
        """Counts [1, V] after tokens [k]."""
        for token in tokens if self._processor else []:
            counts = self._processor.update(counts, token[None])
        return counts

    def counts_along(self, tokens: mx.array) -> mx.array:
        """Counts [k + 1, V] after the first 0 to k of the tokens [k]."""
        counts = [self.counts]
        for token in tokens if self._processor else []:
            counts.append(self.counts_after(counts[-1], token[None]))
        return mx.concatenate(counts)

    def _process(self, logits: mx.array, counts: mx.array) -> mx.array:
        width = min(logits.shape[-1], self.vocab_size)
        logits = logits[:, :width].astype(mx.float32)
        if width < self.vocab_size:
            missing = self.vocab_size - width
            logits = mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf)
        return self._processor(logits, counts) if self._processor else logits


def sample_rows(
    samplers: Sequence[Sampler],
    logits: mx.array,
    positions: Sequence[int],
    counts: Sequence[mx.array] | None = None,
) -> mx.array:
    """Samples int32 [B, N] of B requests at N consecutive positions each.

    Args:
        logits: [B, N, W] of the target or of a draft model; see `Sampler.sample`.
        positions: of the first sample of every request.
        counts: [k_i, V], k_i <= N, for the penalties of each request, which has k_i
            positions; None = those of the samplers.
    """
    rows, width, vocab_size = logits.shape
    is_whole = vocab_size == samplers[0].vocab_size
    if is_whole and not any(sampler.has_counts for sampler in samplers):
        places = [range(p, p + width) for p in positions]
        flat = logits.reshape(rows * width, vocab_size)
        return _sample(samplers, flat, places).reshape(rows, width)
    sampled = []
    for row, (sampler, position) in enumerate(zip(samplers, positions, strict=True)):
        seen = counts[row] if counts else sampler.counts
        used = logits[row, : len(seen)] if seen.size else logits[row]
        places = range(position, position + len(used))
        tokens = sampler.sample(used, places, seen)
        sampled.append(mx.pad(tokens, (0, width - len(tokens))))
    return mx.stack(sampled)


def noise_keys(
    samplers: Sequence[Sampler], positions: Sequence[Sequence[int]]
) -> np.ndarray:
    """Keys of the noise of B samplers at k positions each, uint32 [B * k, 2]."""
    # Two keys that differ give independent noise (Threefry, Salmon et al. 2011).
    seeds = np.stack([sampler.seed for sampler in samplers])
    low = seeds[:, 1:] + np.array(positions, np.uint32)
    high = np.broadcast_to(seeds[:, :1], low.shape)
    return np.stack([high, low], axis=-1).reshape(-1, 2)


@mx.compile
def _draw(logits: mx.array, is_greedy: mx.array, keys: mx.array) -> mx.array:
    """Tokens int32 [M] of filtered logits [M, V], by noise keys [M, 2].

    Args:
        is_greedy: [M, 1]; such rows have no noise.
    """
    shape = logits.shape[-1:]
    noise = mx.vmap(lambda key: mx.random.gumbel(shape, key=key))(keys)
    noisy = mx.where(is_greedy, logits, logits + noise)
    return mx.argmax(noisy, axis=-1).astype(mx.int32)


def _sample(
    samplers: Sequence[Sampler], logits: mx.array, positions: Sequence[Sequence[int]]
) -> mx.array:
    """Tokens int32 [B * N] of samplers at N positions each, from logits [B * N, V]."""
    samplings = [
        s.sampling for s, row in zip(samplers, positions, strict=True) for _ in row
    ]
    if all(each.is_greedy for each in samplings):
        return mx.argmax(logits, axis=-1).astype(mx.int32)
    is_greedy = mx.array([[each.is_greedy] for each in samplings])
    keys = mx.array(noise_keys(samplers, positions))
    return _draw(filter_logits(logits, *samplings), is_greedy, keys)
