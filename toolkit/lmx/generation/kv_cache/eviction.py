"""A bound for the keys and values that a request keeps, and what it keeps of them."""

from dataclasses import dataclass

import mlx.core as mx

from ...config.quant_spec import KVPolicy
from ...errors import UserError

SINKS = 4
"""First positions that are always kept, as by mlx-lm: all others attend to them."""
OBSERVED = 32
"""Last queries of a prompt, whose attention chooses what snapkv keeps of it."""
POOLED = 7
"""Neighbours that share their largest attention, so that words stay whole."""


@dataclass(frozen=True)
class KVLimit:
    """At most so many keys and values of a request, in layers with full attention.

    Attributes:
        max_size: positions that a token attends to, with itself.
        policy: window = the first `SINKS` and the last ones; snapkv = the same, but a
            longer prompt is processed whole. Then it keeps the positions that its last
            queries attend to most, by layer and head (SnapKV, arXiv 2404.14469).
    """

    max_size: int
    policy: KVPolicy = "window"

    @property
    def selects(self) -> bool:
        """Whether a prompt is stored whole until its end."""
        return self.policy == "snapkv"

    def reusable(self, prompt_length: int) -> int:
        """Tokens of a prompt that may come from a prefix cache, and one more.

        The others must be processed, because their queries are needed.
        """
        is_cut = self.selects and prompt_length > self.max_size
        return prompt_length - OBSERVED if is_cut else prompt_length


def kv_limit(max_size: int | None, policy: KVPolicy | None) -> KVLimit | None:
    """The limit of these options; None = there is none.

    Raises:
        UserError: there is a policy without a size.
    """
    if policy and max_size is None:
        raise UserError("kv_policy needs max_kv_size")
    return KVLimit(max_size, policy or "window") if max_size else None


class ObservedQueries:
    """The last queries of a layer.

    Attributes:
        queries: [1, a multiple of H, at most OBSERVED, D], with positional encoding.
        is_biased: whether the attention adds other numbers to the scores.
    """

    def __init__(self) -> None:
        self.queries: mx.array | None = None
        self.is_biased = False
        self._scale, self._end = 1.0, 0

    def add(self, queries: mx.array, mask: object, scale: float, end: int) -> None:
        """Keep the queries of positions up to `end`."""
        if end == self._end:
            return  # they are those of another layer, which shares the keys
        older, count = self.queries, queries.shape[2]
        queries = queries[:, :, -OBSERVED:]
        if older is not None and count < OBSERVED:
            older = older[:, :, count - OBSERVED :]
            queries = mx.concatenate([older, queries], axis=2)
        self.queries, self._scale, self._end = mx.contiguous(queries), scale, end
        self.is_biased = isinstance(mask, mx.array) and mask.dtype != mx.bool_

    def belongs_to(self, keys: mx.array) -> bool:
        """Whether the attention is that of the queries to these keys."""
        queries = self.queries
        if queries is None or self.is_biased:
            return False
        return (
            queries.shape[3] == keys.shape[3] and not queries.shape[1] % keys.shape[1]
        )

    def most_attended(self, keys: mx.array, count: int, keep: int) -> mx.array:
        """Positions to keep of a prompt, int32 [1, H, count].

        Args:
            keys: of all positions, [1, H, L, D].
            keep: first positions that are kept in any case, as the observed ones are.

        Returns:
            The first positions, those between by rising attention, the observed ones.
        """
        _, heads, length, size = keys.shape
        observed = self.queries.shape[2]
        start = length - observed
        assert count > keep + observed, "see MIN_KV_SIZE"
        queries = self.queries.astype(mx.float32).reshape(1, heads, -1, observed, size)
        keys = keys.astype(mx.float32)[:, :, None]
        scores = self._scale * (queries @ keys.swapaxes(-1, -2))
        causal = mx.arange(length) <= mx.arange(start, length)[:, None]
        weights = mx.softmax(mx.where(causal, scores, -mx.inf), axis=-1)
        between = weights.mean(axis=(2, 3))[..., keep:start]
        margin = POOLED // 2
        padded = mx.pad(between, [(0, 0), (0, 0), (margin, margin)])
        shifted = [padded[..., i : i + start - keep] for i in range(POOLED)]
        order = mx.argsort(mx.stack(shifted).max(axis=0), axis=-1)
        chosen = order[..., keep + observed - count :].astype(mx.int32) + keep

        def every_head(first: int, end: int) -> mx.array:
            positions = mx.arange(first, end, dtype=mx.int32)
            return mx.broadcast_to(positions, (1, heads, end - first))

        parts = every_head(0, keep), chosen, every_head(start, length)
        return mx.concatenate(parts, axis=-1)
