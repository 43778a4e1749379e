"""Attention for training on MLX's CPU backend, by blocks of queries.

MLX's own keeps all scores for the backward pass, and makes those a causal mask hides.
Here a block's scores are made again from the logarithm of their sums (as in arXiv
2205.14135), up to the last key that the block sees.
"""

import mlx.core as mx

from .fast_exp import exp

BLOCK = 128
HIDDEN = -1e30


def attention(queries, keys, values, scale: float, causal: bool) -> mx.array:
    """softmax(scale * queries keys^T) values, differentiable.

    Args:
        queries: float32 [B, H, L, D].
        keys: [B, H or a divisor of H, L, D], as are values.
        causal: whether a query sees the keys up to its own place alone.
    """
    batch, heads, length, size = queries.shape
    groups = keys.shape[1]
    grouped = queries.reshape(batch, groups, heads // groups, length, size)
    # Every product would copy what is only seen as if its heads came first.
    keys, values = (mx.contiguous(x[:, :, None]) for x in (keys, values))

    @mx.custom_function
    def forward(queries, keys, values):
        return _forward(queries, keys, values, scale, causal)

    @forward.vjp
    def _(primals, cotangents, outputs):
        return _backward(*primals, cotangents[0], *outputs, scale, causal)

    return forward(grouped, keys, values)[0].reshape((*queries.shape[:3], -1))


def _blocks(length: int, causal: bool):
    """Of every block of queries, its start and end, and the end of the keys it sees."""
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        yield start, end, end if causal else length


def _scores(queries, keys, scale: float, start: int, causal: bool) -> mx.array:
    scores = (scale * queries) @ keys.swapaxes(-1, -2)
    if causal:
        own = start + mx.arange(queries.shape[-2])[:, None]
        scores = mx.where(mx.arange(keys.shape[-2]) <= own, scores, HIDDEN)
    return mx.contiguous(scores)


def _forward(queries, keys, values, scale, causal):
    """The output, and the logarithms of the sums of exponentials."""
    outputs, logarithms = [], []
    for start, end, seen in _blocks(queries.shape[-2], causal):
        block = queries[..., start:end, :]
        if outputs:
            # One after the other: the scores of two need not exist at once.
            [block] = mx.depends([block], outputs[-1:])
        scores = _scores(block, keys[..., :seen, :], scale, start, causal)
        largest = scores.max(axis=-1, keepdims=True)
        weights = exp(mx.contiguous(scores - largest))
        total = weights.sum(axis=-1, keepdims=True)
        outputs.append((weights @ values[..., :seen, :]) / total)
        logarithms.append(mx.log(total) + largest)
    return mx.concatenate(outputs, axis=-2), mx.concatenate(logarithms, axis=-2)


def _backward(queries, keys, values, cotangent, output, logarithms, scale, causal):
    """The gradients by queries, keys and values."""
    length = queries.shape[-2]
    cotangent = mx.contiguous(cotangent)
    by_queries, by_keys, by_values = [], None, None
    weighted = (cotangent * output).sum(axis=-1, keepdims=True)
    # The last block sees all keys.
    for start, end, seen in reversed(list(_blocks(length, causal))):
        rows = slice(start, end)
        block = queries[..., rows, :]
        if by_queries:
            [block] = mx.depends([block], [by_queries[-1], by_keys, by_values])
        given, own = keys[..., :seen, :], cotangent[..., rows, :]
        scores = _scores(block, given, scale, start, causal)
        weights = exp(mx.contiguous(scores - logarithms[..., rows, :]))
        errors = own @ values[..., :seen, :].swapaxes(-1, -2)
        errors = scale * weights * (errors - weighted[..., rows, :])
        by_queries.append(errors @ given)
        by_keys = _added(by_keys, errors, block)
        by_values = _added(by_values, weights, own)
    return mx.concatenate(by_queries[::-1], axis=-2), by_keys, by_values


def _added(total: mx.array | None, left, right) -> mx.array:
    """`total` plus left^T right in its first rows, summed over the queries' heads."""
    found = left.swapaxes(-1, -2) @ right
    if found.shape[2] > 1:
        found = found.sum(axis=2, keepdims=True)
    if total is None:
        return found
    rows = found.shape[-2]
    first, rest = total[..., :rows, :] + found, total[..., rows:, :]
    return mx.concatenate([first, rest], axis=-2) if rest.size else first
