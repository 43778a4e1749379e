"""Log-probabilities of the tokens that are chosen."""

from collections.abc import Sequence

import mlx.core as mx

from .sequence import RunningSequence


def token_logprobs(
    sequences: Sequence[RunningSequence],
    logits: mx.array,
    allowed: mx.array,
    tokens: mx.array,
    counts: Sequence[mx.array] | None = None,
) -> mx.array | None:
    """Log-probabilities [B, N] of tokens [B, N], if a request wants them.

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
    logits = logits.astype(mx.float32)
    chosen = mx.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return chosen - mx.logsumexp(logits, axis=-1)


def _processed(
    sequences: Sequence[RunningSequence],
    logits: mx.array,
    allowed: mx.array,
    counts: Sequence[mx.array] | None,
) -> mx.array:
    """The logits [B, N, V] that are sampled from, where a request wants them."""
    samplers = [sequence.sampler for sequence in sequences]
    key, shape = samplers[0].batch_key, logits.shape
    wants = [s.request.logprobs == "processed" for s in sequences]
    if all(wants) and key and all(s.batch_key == key for s in samplers):
        return samplers[0].process(allowed.reshape(-1, shape[-1])).reshape(shape)
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
