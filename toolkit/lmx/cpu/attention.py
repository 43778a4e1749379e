"""Faster attention on MLX's CPU backend, for training and for decoding.

For training, MLX's attention keeps all scores for the backward pass and computes those
that a causal mask hides. Here the backward pass recomputes the scores of a block of
queries from their log-sum-exp (FlashAttention, arXiv 2205.14135), with a causal mask
only up to the last key that the block attends to. For decoding, MLX's attention reads
the keys and values again for every query head of a group.
"""

import mlx.core as mx

from .fast_exp import exp

BLOCK = 128
MASKED = -1e30


def attention(
    queries, keys, values, scale: float, mask: mx.array | str | None
) -> mx.array:
    """softmax(scale * queries keys^T) values, differentiable.

    Args:
        queries: float32 [B, H, L, D].
        keys: [B, H or a divisor of H, L, D]; values have the same shape.
        mask: "causal": a query attends to keys up to its own position; or bool [B or
            1, 1, L, L], true where a query attends to a key; None = all.
    """
    batch, heads, length, size = queries.shape
    groups = keys.shape[1]
    grouped = queries.reshape(batch, groups, heads // groups, length, size)
    # Keys and values may be transposed views, which every product would copy again.
    keys, values = (mx.contiguous(x[:, :, None]) for x in (keys, values))
    if isinstance(mask, mx.array):
        mask = mask[:, :, None]

    @mx.custom_function
    def forward(queries, keys, values):
        return _forward(queries, keys, values, scale, mask)

    @forward.vjp
    def _(primals, cotangents, outputs):
        return _backward(*primals, cotangents[0], *outputs, scale, mask)

    return forward(grouped, keys, values)[0].reshape((*queries.shape[:3], -1))


def decoding_attention(
    queries, keys, values, scale: float, mask: mx.array | None
) -> mx.array:
    """softmax(scale * queries keys^T) values, with one product for a group of heads.

    Args:
        queries: [B, H, N, D].
        keys: [B, K, T, D], K a divisor of H; values have the same shape but for D.
        mask: bool [B or 1, 1, N, T], true where a query attends to a key; None = all.
    """
    batch, heads, length, size = queries.shape
    groups = keys.shape[1]
    queries = (scale * queries).reshape(batch, groups, -1, size)
    scores = queries @ keys.swapaxes(-1, -2)
    if mask is not None:
        by_head = scores.reshape(batch, groups, heads // groups, length, -1)
        masked = mx.where(mask[:, :, None], by_head, MASKED)
        scores = masked.reshape(scores.shape)
    outputs = mx.softmax(scores, axis=-1) @ values
    return outputs.reshape(batch, heads, length, -1)


def _blocks(length: int, mask: mx.array | str | None):
    """Start and end of every block of queries, and the end of the keys it sees."""
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        yield start, end, end if isinstance(mask, str) else length


def _scores(
    queries, keys, scale: float, start: int, mask: mx.array | str | None
) -> mx.array:
    scores = (scale * queries) @ keys.swapaxes(-1, -2)
    rows = queries.shape[-2]
    if isinstance(mask, str):
        positions = start + mx.arange(rows)[:, None]
        scores = mx.where(mx.arange(keys.shape[-2]) <= positions, scores, MASKED)
    elif mask is not None:
        scores = mx.where(mask[..., start : start + rows, :], scores, MASKED)
    return mx.contiguous(scores)


def _forward(queries, keys, values, scale, mask):
    """The output, and the log-sum-exp of the scores."""
    outputs, log_sums = [], []
    for start, end, key_end in _blocks(queries.shape[-2], mask):
        block = queries[..., start:end, :]
        if outputs:
            # Run the blocks in turn, so that only one holds its scores.
            [block] = mx.depends([block], outputs[-1:])
        scores = _scores(block, keys[..., :key_end, :], scale, start, mask)
        largest = scores.max(axis=-1, keepdims=True)
        weights = exp(mx.contiguous(scores - largest))
        total = weights.sum(axis=-1, keepdims=True)
        outputs.append((weights @ values[..., :key_end, :]) / total)
        log_sums.append(mx.log(total) + largest)
    return mx.concatenate(outputs, axis=-2), mx.concatenate(log_sums, axis=-2)


def _backward(queries, keys, values, cotangent, output, log_sums, scale, mask):
    """The gradients of queries, keys and values."""
    length = queries.shape[-2]
    cotangent = mx.contiguous(cotangent)
    query_gradients, key_gradient, value_gradient = [], None, None
    weighted = (cotangent * output).sum(axis=-1, keepdims=True)
    # The last block attends to all keys, so it gives the gradients their full length.
    for start, end, key_end in reversed(list(_blocks(length, mask))):
        rows = slice(start, end)
        block = queries[..., rows, :]
        if query_gradients:
            previous = [query_gradients[-1], key_gradient, value_gradient]
            [block] = mx.depends([block], previous)
        block_keys, block_cotangent = keys[..., :key_end, :], cotangent[..., rows, :]
        scores = _scores(block, block_keys, scale, start, mask)
        weights = exp(mx.contiguous(scores - log_sums[..., rows, :]))
        errors = block_cotangent @ values[..., :key_end, :].swapaxes(-1, -2)
        errors = scale * weights * (errors - weighted[..., rows, :])
        query_gradients.append(errors @ block_keys)
        key_gradient = _accumulate(key_gradient, errors, block)
        value_gradient = _accumulate(value_gradient, weights, block_cotangent)
    return mx.concatenate(query_gradients[::-1], axis=-2), key_gradient, value_gradient


def _accumulate(total: mx.array | None, left, right) -> mx.array:
    """Add left^T right, summed over the query heads of a group, to the first rows."""
    product = left.swapaxes(-1, -2) @ right
    if product.shape[2] > 1:
        product = product.sum(axis=2, keepdims=True)
    if total is None:
        return product
    rows = product.shape[-2]
    first, unchanged = total[..., :rows, :] + product, total[..., rows:, :]
    return mx.concatenate([first, unchanged], axis=-2) if unchanged.size else first
