"""The decoder layers of EAGLE-3, for whole texts, caches and training-time test."""

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..loader import make_rope
from .base import SwiGLU
from .eagle3_config import Eagle3Config


class KeysValues(NamedTuple):
    """Keys and values, both [B, kv_heads, L, head_dim]."""

    keys: mx.array
    values: mx.array


class DraftContext(NamedTuple):
    """What the draft tokens of M rounds attend to in one layer.

    Attributes:
        context: keys and values of all L rows.
        rows: int [B, M], the row at which a round starts: it sees no later row.
        drafted: keys and values [B, kv_heads, M, head_dim] of the earlier draft tokens
            of the same round.
    """

    context: KeysValues
    rows: mx.array
    drafted: list[KeysValues]


class Eagle3Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    Args:
        input_size: width of its input, which may be wider than its output.
    """

    def __init__(self, config: Eagle3Config, input_size: int):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        heads, kv_heads = (
            count * config.head_dim for count in (self.num_heads, self.num_kv_heads)
        )
        bias = config.attention_bias
        self.q_proj = nn.Linear(input_size, heads, bias=bias)
        self.k_proj = nn.Linear(input_size, kv_heads, bias=bias)
        self.v_proj = nn.Linear(input_size, kv_heads, bias=bias)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=bias)
        self.rope = make_rope(config.rotary_dim, config.rope)

    def __call__(self, x: mx.array, cache: Any = None) -> tuple[mx.array, KeysValues]:
        """Outputs [B, L, width] for inputs [B, L, input_size], causal."""
        offset = 0 if cache is None else cache.offset
        queries, keys, values = (
            self._split(y, heads) for y, heads in self._projections(x)
        )
        queries, keys = (
            self.rope(queries, offset=offset),
            self.rope(keys, offset=offset),
        )
        if cache:
            keys, values = cache.update_and_fetch(keys, values)
        mask = "causal" if x.shape[1] > 1 else None
        output = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.scale, mask=mask
        )
        output = output.swapaxes(1, 2).flatten(2)
        return self.o_proj(output), KeysValues(keys, values)

    def draft(self, x: mx.array, context: DraftContext) -> mx.array:
        """Outputs [B, M, width] of the next draft token of M rounds.

        Its keys and values are added to those of the context.
        """
        batch, rounds, _ = x.shape
        # One position per round: all rounds are a batch of texts with one token.
        positions = (context.rows + len(context.drafted) + 1).flatten()
        queries, keys, values = (
            y.reshape(batch * rounds, heads, 1, self.head_dim)
            for y, heads in self._projections(x)
        )
        queries, keys = (self.rope(y, offset=positions) for y in (queries, keys))
        queries, keys, values = (
            y.reshape(batch, rounds, -1, self.head_dim).swapaxes(1, 2)
            for y in (queries, keys, values)
        )
        context.drafted.append(KeysValues(keys, values))
        output = self._attend(queries, context)
        return self.o_proj(output.swapaxes(1, 2).flatten(2))

    def _attend(self, queries: mx.array, context: DraftContext) -> mx.array:
        """Outputs [B, heads, M, head_dim]."""
        batch, heads, rounds, size = queries.shape
        groups = heads // self.num_kv_heads
        queries = self.scale * queries.reshape(batch, -1, groups, rounds, size)
        keys, values = (x[:, :, None] for x in context.context)
        length = keys.shape[-2]
        scores = queries @ keys.swapaxes(-1, -2)
        visible = mx.arange(length) <= context.rows[..., None]
        scores = mx.where(visible[:, None, None], scores, -mx.inf)
        drafted = [
            (queries * keys[:, :, None]).sum(axis=-1, keepdims=True)
            for keys, _ in context.drafted
        ]
        scores = mx.concatenate([scores, *drafted], axis=-1)
        weights = mx.softmax(scores, axis=-1, precise=True)
        output = weights[..., :length] @ values
        for index, (_, values) in enumerate(context.drafted):
            weight = weights[..., length + index : length + index + 1]
            output = output + weight * values[:, :, None]
        return output.reshape(batch, heads, rounds, size)

    def _projections(self, x: mx.array) -> list[tuple[mx.array, int]]:
        return [
            (self.q_proj(x), self.num_heads),
            (self.k_proj(x), self.num_kv_heads),
            (self.v_proj(x), self.num_kv_heads),
        ]

    def _split(self, x: mx.array, heads: int) -> mx.array:
        return x.reshape(*x.shape[:2], heads, self.head_dim).swapaxes(1, 2)


class Eagle3Layer(nn.Module):
    """A decoder layer. The attention of the first one reads token embeddings, too."""

    def __init__(self, config: Eagle3Config, *, is_first: bool):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.is_first = is_first
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        if is_first:
            self.hidden_norm = nn.RMSNorm(width, eps=eps)
        self.self_attn = Eagle3Attention(config, width * (1 + is_first))
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)
        self.mlp = SwiGLU(width, config.intermediate_size)

    def __call__(
        self, embeddings: mx.array, hidden: mx.array, cache: Any = None
    ) -> tuple[mx.array, KeysValues]:
        """Outputs [B, L, width], and the keys and values."""
        x, residual = self._normalize(embeddings, hidden)
        x, keys_values = self.self_attn(x, cache)
        return self._add_mlp(residual + x), keys_values

    def draft(
        self, embeddings: mx.array, hidden: mx.array, context: DraftContext
    ) -> mx.array:
        """Outputs [B, M, width] of the next draft token of M rounds."""
        x, residual = self._normalize(embeddings, hidden)
        return self._add_mlp(residual + self.self_attn.draft(x, context))

    def _normalize(
        self, embeddings: mx.array, hidden: mx.array
    ) -> tuple[mx.array, mx.array]:
        """The input of the attention, and the residual."""
        if not self.is_first:
            return self.input_layernorm(hidden), hidden
        normalized = self.hidden_norm(hidden)
        x = mx.concatenate([self.input_layernorm(embeddings), normalized], axis=-1)
        return x, normalized if self.norm_before_residual else hidden

    def _add_mlp(self, hidden: mx.array) -> mx.array:
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
