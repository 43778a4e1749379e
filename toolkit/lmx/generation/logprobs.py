"""Log-probabilities of the tokens that were chosen, and of the most likely ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..models.top_k import top_k_indices
from .sampling import filter_logits
from .sequence import NO_LOGPROBS, RunningSequence, TokenLogprobs

SCORED = 64
"""Positions of a prompt whose float32 logits are in memory at once."""


@dataclass(frozen=True)
class BatchLogprobs:
    """Lazy log-probabilities of B requests at N positions each.

    Attributes:
        arrays: of the chosen tokens [B, N], and the ids and log-probabilities of the
            K most likely ones [B, N, K].
        counts: how many of these every request wants; None = no log-probabilities.
    """

    arrays: tuple[mx.array, ...]
    counts: tuple[int | None, ...]

    def read(self) -> list[list[TokenLogprobs]]:
        """The log-probabilities of every request at every position."""
        chosen, *top = (array.tolist() for array in self.arrays)
        rows = []
        for row, count in enumerate(self.counts):
            if count is None:
                rows.append([NO_LOGPROBS] * len(chosen[row]))
                continue
            best = [()] * len(chosen[row])
            if count:
                best = [
                    _largest(ids, values, count)
                    for ids, values in zip(*(part[row] for part in top), strict=True)
                ]
            pairs = zip(chosen[row], best, strict=True)
            rows.append([TokenLogprobs(*pair) for pair in pairs])
        return rows


def _largest(ids: list[int], values: list[float], count: int) -> tuple:
    pairs = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return tuple(pairs[:count])


def token_logprobs(
    sequences: Sequence[RunningSequence],
    logits: mx.array,
    allowed: mx.array,
    tokens: mx.array,
    counts: Sequence[mx.array] | None = None,
) -> BatchLogprobs | None:
    """Log-probabilities of tokens [B, N], if a request wants them.

    Args:
        logits: [B, N, V] of the model.
        allowed: the same, -inf for tokens that a grammar refuses.
        counts: those of `sample_rows`.
    """
    kinds = {sequence.request.logprobs for sequence in sequences}
    if kinds == {None}:
        return None
    if "processed" in kinds:
        logits = _processed(sequences, logits, allowed, counts)
    wanted = tuple(
        None if s.request.logprobs is None else s.request.top_logprobs
        for s in sequences
    )
    return _of_tokens(logits, tokens, wanted)


def prompt_logprobs(
    sequence: RunningSequence, logits: mx.array, start: int
) -> list[TokenLogprobs]:
    """Log-probabilities of the n tokens of a prompt after a position.

    Args:
        logits: [1, n, V] of the model, from this position.
    """
    scores = []
    for first in range(0, logits.shape[1], SCORED):
        part = logits[:, first : first + SCORED]
        at = start + first + 1
        tokens = mx.array([sequence.tokens[at : at + part.shape[1]]], mx.int32)
        (row,) = _of_tokens(part, tokens, (sequence.request.top_logprobs,)).read()
        scores += row
    return scores


def _of_tokens(
    logits: mx.array, tokens: mx.array, wanted: tuple[int | None, ...]
) -> BatchLogprobs:
    logits = logits.astype(mx.float32)
    norms = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logits, tokens[..., None], axis=-1) - norms
    arrays = [chosen[..., 0]]
    if most := max(count or 0 for count in wanted):
        best = top_k_indices(logits, most)
        arrays += [best, mx.take_along_axis(logits, best, axis=-1) - norms]
    return BatchLogprobs(tuple(arrays), wanted)


def _processed(
    sequences: Sequence[RunningSequence],
    logits: mx.array,
    allowed: mx.array,
    counts: Sequence[mx.array] | None,
) -> mx.array:
    """The logits [B, N, V] that are sampled from, where a request wants them."""
    samplers = [sequence.sampler for sequence in sequences]
    shape = logits.shape
    wants = [s.request.logprobs == "processed" for s in sequences]
    if all(wants) and not any(sampler.has_counts for sampler in samplers):
        settings = [s.sampling for s in samplers for _ in range(shape[1])]
        flat = allowed.reshape(-1, shape[-1])
        return filter_logits(flat, *settings).reshape(shape)
    rows = []
    for row, sampler in enumerate(samplers):
        values = logits[row]
        if wants[row]:
            seen = counts[row] if counts else sampler.counts
            # Without penalties, the logits of all positions are processed alike.
            values = allowed[row, : len(seen)] if seen.size else allowed[row]
            values = sampler.process(values, seen)
            values = mx.pad(values, [(0, shape[1] - len(values)), (0, 0)])
        rows.append(values.astype(mx.float32))
    return mx.stack(rows)
