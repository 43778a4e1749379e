"""DFlash (arXiv 2602.06036): a drafter that predicts a whole block of tokens at once.

The block is the anchor, which is the last known token, and one mask token for every
draft token. It attends to itself, in both directions, and to the target's hidden states
of all tokens before the anchor, which are keys and values of every layer.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..loader import kv_cache, make_rope
from .base import Drafter, SwiGLU, initialize_from_target
from .configs import DFlashConfig, architectures

KeysValues = tuple[mx.array, mx.array]


class DFlashAttention(nn.Module):
    """Attention of blocks to themselves and to the context before them."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        width, size = config.hidden_size, config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_groups = config.num_key_value_heads
        self.scale = size**-0.5
        self.q_proj = nn.Linear(width, self.num_heads * size, bias=False)
        self.k_proj = nn.Linear(width, self.num_groups * size, bias=False)
        self.v_proj = nn.Linear(width, self.num_groups * size, bias=False)
        self.o_proj = nn.Linear(self.num_heads * size, width, bias=False)
        self.q_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        # The underscore keeps it out of the parameters.
        self._rope = make_rope(size, config.rope)

    def keys_values(self, rows: mx.array, offset: int | mx.array) -> KeysValues:
        """Keys and values [B, groups, N, D] of rows [B, N, width].

        Args:
            offset: position of the first row, or of the first row of every sequence.
        """
        keys = self.k_norm(self._heads(self.k_proj(rows), self.num_groups))
        values = self._heads(self.v_proj(rows), self.num_groups)
        return self._rope(keys.swapaxes(1, 2), offset=offset), values.swapaxes(1, 2)

    def __call__(
        self,
        hidden: mx.array,
        starts: mx.array,
        context: KeysValues,
        mask: mx.array | None,
    ) -> mx.array:
        """The output [B, M, S, width] for M blocks of S slots, [B, M, S, width].

        Args:
            starts: int [B, M], positions of the anchors.
            context: keys and values [B, groups, C, D].
            mask: bool [B, M, C], True where a block attends; None = everywhere.
        """
        batch, count, slots, _ = hidden.shape
        rows, offsets = hidden.flatten(0, 1), starts.reshape(-1)
        queries = self.q_norm(self._heads(self.q_proj(rows), self.num_heads))
        queries = self._rope(queries.swapaxes(1, 2), offset=offsets)
        blocks = [queries, *self.keys_values(rows, offsets)]
        # [B, heads, M, S, D]
        queries, keys, values = (
            x.reshape(batch, count, *x.shape[1:]).swapaxes(1, 2) for x in blocks
        )
        output = attend(self.scale * queries, context, (keys, values), mask)
        output = output.transpose(0, 2, 3, 1, 4)
        return self.o_proj(output.reshape(batch, count, slots, -1))

    def _heads(self, rows: mx.array, count: int) -> mx.array:
        return rows.reshape(*rows.shape[:-1], count, -1)


def attend(
    queries: mx.array, context: KeysValues, block: KeysValues, mask: mx.array | None
) -> mx.array:
    """Attention of every block to its own slots and to the context.

    Scores between different blocks are never computed.

    Args:
        queries: [B, H, M, S, D], scaled.
        context: keys and values [B, H or a divisor of H, C, D].
        block: keys and values [B, the same, M, S, D].
        mask: bool [B, M, C]; None = all True.
    """
    batch, heads, count, slots, size = queries.shape
    keys, values = context
    groups, length = keys.shape[1:3]
    # Products with the context have all queries of a group of heads as rows.
    flat = queries.reshape(batch, groups, -1, size)
    split = batch, groups, heads // groups, count, slots
    to_context = (flat @ keys.swapaxes(-1, -2)).reshape(*split, length)
    if mask is not None:
        lowest = mx.finfo(queries.dtype).min
        to_context = mx.where(mask[:, None, None, :, None], to_context, lowest)
    own_keys, own_values = (x[:, :, None] for x in block)
    to_block = queries.reshape(*split, size) @ own_keys.swapaxes(-1, -2)
    scores = mx.concatenate([to_context, to_block], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)
    from_context = weights[..., :length].reshape(batch, groups, -1, length) @ values
    from_block = weights[..., length:] @ own_values
    output = from_context.reshape(from_block.shape) + from_block
    return output.reshape(queries.shape)


class DFlashLayer(nn.Module):
    """One decoder layer; arguments are those of `DFlashAttention`."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = DFlashAttention(config)
        self.mlp = SwiGLU(width, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)

    def __call__(self, hidden: mx.array, *context: Any) -> mx.array:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), *context)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DFlashDrafter(Drafter):
    """A DFlash drafter with random weights."""

    architecture = "dflash"
    config_class = DFlashConfig
    drafts_in_one_pass = True

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.config = config
        self.layer_ids = config.target_layer_ids
        self.max_draft_tokens = config.block_size - 1
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(self.layer_ids) * width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps=eps)
        self.layers = [DFlashLayer(config) for _ in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(width, eps=eps)

    def initialize(self) -> None:
        """Start with the target's last blocks."""
        initialize_from_target(self._target.model, self.fc, self.layers, self.norm)
        mx.eval(self.parameters())

    # Training and evaluation

    def draft_hidden(
        self,
        tokens: mx.array,
        states: mx.array,
        starts: mx.array,
        num_draft_tokens: int,
    ) -> mx.array:
        """The outputs of all blocks, which pass through the layers side by side."""
        rows = self.hidden_norm(self.fc(states))
        # The target has not processed the anchor.
        mask = mx.arange(states.shape[1]) < starts[..., None]
        hidden = self._embed_blocks(mx.take_along_axis(tokens, starts, axis=1))
        for layer in self.layers:
            context = layer.self_attn.keys_values(rows, 0)
            hidden = layer(hidden, starts, context, mask)
        return self._outputs(hidden, num_draft_tokens)

    def sample_starts(self, mask: mx.array) -> mx.array:
        """Random starts without repetition, one per `block_size` tokens of the text.

        If a text has fewer that are trained, the rest is the end of the text, where
        there is nothing to predict.
        """
        length = mask.shape[1]
        count = -(-length // self.config.block_size)
        # Nothing is known before the first token.
        allowed = mask & (mx.arange(length) > 0)
        order = mx.where(allowed, mx.random.uniform(shape=mask.shape), 2.0)
        starts = mx.argsort(order, axis=1)[:, :count]
        is_allowed = mx.take_along_axis(allowed, starts, axis=1)
        return mx.where(is_allowed, starts, length).astype(mx.int32)

    # Generation

    def make_cache(self) -> list:
        """Caches of the keys and values of the context, one per layer."""
        return [kv_cache() for _ in self.layers]

    def extend_context(self, states: mx.array, start: int, cache: list) -> None:
        """Add hidden states [1, N, n * width] from the position `start` on."""
        rows = self.hidden_norm(self.fc(states))
        for layer, stored in zip(self.layers, cache, strict=True):
            stored.update_and_fetch(*layer.self_attn.keys_values(rows, start))

    def draft_block(
        self, anchor: int, position: int, cache: list, num_draft_tokens: int
    ) -> mx.array:
        """Outputs [K, width] for the draft tokens after an anchor.

        Equal to those of `draft_hidden` if the cache has all tokens before the anchor.
        """
        starts = mx.array([[position]])
        hidden = self._embed_blocks(mx.array([[anchor]]))
        for layer, stored in zip(self.layers, cache, strict=True):
            context = tuple(
                x[..., : stored.offset, :] for x in (stored.keys, stored.values)
            )
            hidden = layer(hidden, starts, context, None)
        return self._outputs(hidden, num_draft_tokens)[0, 0]

    def _embed_blocks(self, anchors: mx.array) -> mx.array:
        """The embeddings [B, M, S, width] of blocks with these anchors [B, M]."""
        slots = *anchors.shape, self.max_draft_tokens
        masks = mx.full(slots, self.config.mask_token_id, anchors.dtype)
        blocks = mx.concatenate([anchors[..., None], masks], axis=-1)
        # As one sequence each: some embeddings depend on the position.
        embedded = self._target.embed(blocks.flatten(0, 1))
        embedded = embedded.reshape(*blocks.shape, -1)
        return embedded.astype(self.fc.weight.dtype)

    def _outputs(self, hidden: mx.array, num_draft_tokens: int) -> mx.array:
        assert num_draft_tokens <= self.max_draft_tokens
        # The slot of the anchor predicts nothing.
        return self.norm(hidden[:, :, 1 : num_draft_tokens + 1])

    # Files

    @classmethod
    def matches(cls, config: dict) -> bool:
        """Whether a config.json is of any version of DFlash."""
        return (
            "dflash_config" in config
            or config.get("speculators_model_type") == "dflash"
            or any(name.startswith("DFlash") for name in architectures(config))
        )

    def export_weights(self) -> dict[str, mx.array]:
        return dict(tree_flatten(self.parameters()))
