"""EAGLE-3 (arXiv 2503.01840): one decoder layer that drafts a token after the other.

Row t of its text has the embedding of token t + 1 beside the target's hidden states of
token t, joined by `fc`, and predicts token t + 2. After the last row, the output for a
draft token takes the place of the states of the next one.
"""

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ...errors import UserError
from ..loader import kv_cache, make_rope
from .base import Drafter, SwiGLU, TrainingRounds, initialize_from_target
from .configs import SGLANG, SPECULATORS, Eagle3Config, architectures, default_layer_ids

# Rows of the embedding, and columns of the target's LM head, that are made at once.
CHUNK, COLUMNS_AT_ONCE = 4096, 256
# One of so many rounds of a training step has more than the first draft token.
ROUNDS_OF_LATER_TOKENS = 4
SGLANG_LAYER = "midlayer."
# Weights of other programs that are not read: those of the target.
TARGET_WEIGHTS = (
    "embed_tokens.weight",
    "verifier_lm_head.weight",
    "verifier_norm.weight",
)


def spread_starts(tokens: mx.array, mask: mx.array) -> mx.array:
    """One start of every `ROUNDS_OF_LATER_TOKENS` that are trained, int32 [B, M].

    They depend on the text alone, so that all processes have those that one has. If
    there are fewer, the rest is the end of the text.

    Args:
        tokens: int [B, L + 1].
        mask: bool [B, L], True where the next token is trained.
    """
    length = mask.shape[1]
    count = -(-length // ROUNDS_OF_LATER_TOKENS)
    # Nothing is known before the first token.
    places = mx.arange(length)
    allowed = mask & (places > 0)
    in_order = mx.sort(mx.where(allowed, places, length), axis=1)
    first = tokens.sum(axis=1, keepdims=True) % ROUNDS_OF_LATER_TOKENS
    indices = first + ROUNDS_OF_LATER_TOKENS * mx.arange(count)
    starts = mx.take_along_axis(in_order, mx.minimum(indices, length - 1), axis=1)
    return mx.where(indices < length, starts, length).astype(mx.int32)


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
            y.reshape(*y.shape[:2], heads, self.head_dim).swapaxes(1, 2)
            for y, heads in self._projections(x)
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


class Eagle3Drafter(Drafter):
    """An EAGLE-3 drafter with random weights.

    `lm_head` has one row per token that can be drafted; token d + d2t[d] has the row d.
    """

    architecture = "eagle3"
    config_class = Eagle3Config

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.config = config
        width, eps = config.hidden_size, config.rms_norm_eps
        inputs = config.num_states * width
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(inputs, eps=eps)
        self.fc = nn.Linear(inputs, width, bias=False)
        self.layers = [
            Eagle3Layer(config, is_first=not index)
            for index in range(config.num_hidden_layers)
        ]
        self.norm = nn.RMSNorm(width, eps=eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        if config.draft_vocab_size < config.vocab_size:
            self.d2t = mx.zeros(config.draft_vocab_size, mx.int32)
            self.freeze(keys=["d2t"], recurse=False)
        self.layer_ids = config.layer_ids or ()
        self.max_draft_tokens = config.num_draft_tokens

    def choose_layers(self, num_blocks: int) -> None:
        self.layer_ids = self.layer_ids or default_layer_ids(num_blocks)

    def choose_vocabulary(self, counts: np.ndarray) -> None:
        """Choose the most frequent tokens; of equally frequent ones, the first."""
        if "d2t" in self:
            order = np.argsort(-counts[: self.config.vocab_size], kind="stable")
            tokens = np.sort(order[: self.draft_vocab_size])
            self.d2t = mx.array(tokens - np.arange(len(tokens)), mx.int32)

    def initialize(self) -> None:
        """Start with the target's last blocks, and its LM head for tokens to draft."""
        initialize_from_target(self._target.model, self.fc, self.layers, self.norm)
        tokens = self.target_tokens(mx.arange(self.draft_vocab_size))
        offset = self._target.logits(mx.zeros((1, self.config.hidden_size)))
        columns = []
        for start in range(0, self.config.hidden_size, COLUMNS_AT_ONCE):
            # The logits of unit vectors are the columns of the weights.
            units = mx.eye(
                min(COLUMNS_AT_ONCE, self.config.hidden_size - start),
                self.config.hidden_size,
                start,
            )
            logits = self._target.logits(units) - offset
            columns.append(logits[:, tokens].astype(self.lm_head.weight.dtype))
            mx.eval(columns)
        self.lm_head.weight = mx.contiguous(mx.concatenate(columns).T)
        mx.eval(self.parameters())

    # Forward passes

    def make_cache(self) -> list:
        return [kv_cache() for _ in self.layers]

    def read(self, tokens: mx.array, states: mx.array, cache: list) -> mx.array:
        """Append rows to a cache; returns the output [B, n, width].

        Args:
            tokens: int [B, n], the token after every row.
            states: the target's hidden states of n tokens.
        """
        return self._causal(tokens, self._join(states), cache)[0]

    def step(self, token: mx.array, hidden: mx.array, cache: list) -> mx.array:
        """The output [B, 1, width] for the next draft token; appended to the cache.

        Args:
            token: int [B, 1], the last draft token.
            hidden: the output [B, 1, width] that it was predicted from.
        """
        return self._causal(token, hidden, cache)[0]

    def draft_hidden(
        self,
        tokens: mx.array,
        states: mx.array,
        starts: mx.array,
        num_draft_tokens: int,
    ) -> mx.array:
        """The outputs in the training-time test of the paper."""
        text = self._causal(tokens[:, 1:], self._join(states))
        return mx.stack(self._draft(tokens, starts, num_draft_tokens, text), axis=2)

    def training_rounds(
        self,
        tokens: mx.array,
        states: mx.array,
        mask: mx.array,
        num_draft_tokens: int,
    ) -> list[TrainingRounds]:
        """The first draft tokens of all rounds, later ones of some.

        The pass over the text gives the former; a later draft token takes a pass of its
        own over its rounds.
        """
        text = self._causal(tokens[:, 1:], self._join(states))
        every = self.sample_starts(mask)
        rounds = [TrainingRounds(every, 0, text[0][:, :, None])]
        if num_draft_tokens > 1:
            starts = spread_starts(tokens, mask)
            later = self._draft(tokens, starts, num_draft_tokens, text)[1:]
            hidden, weight = mx.stack(later, axis=2), ROUNDS_OF_LATER_TOKENS
            rounds.append(TrainingRounds(starts, 1, hidden, weight))
        return rounds

    def rows_per_token(self, num_draft_tokens: int) -> float:
        return 1.0 + (num_draft_tokens - 1) / ROUNDS_OF_LATER_TOKENS

    def _draft(
        self,
        tokens: mx.array,
        starts: mx.array,
        num_draft_tokens: int,
        text: tuple[mx.array, list[KeysValues]],
    ) -> list[mx.array]:
        """Outputs [B, M, width] of every draft token of M rounds.

        Args:
            text: of `_causal`.
        """
        output, keys_values = text
        length, rows = output.shape[1], starts - 1
        contexts = [DraftContext(layer, rows, []) for layer in keys_values]
        outputs = [mx.take_along_axis(output, rows[..., None], axis=1)]
        for number in range(1, num_draft_tokens):
            places = mx.minimum(starts + number, length)
            drafted = mx.take_along_axis(tokens, places, axis=1)
            embeddings, hidden = self._target.embed(drafted), outputs[-1]
            for layer, context in zip(self.layers, contexts, strict=True):
                hidden = layer.draft(embeddings, hidden, context)
            outputs.append(hidden)
        return outputs

    def head(self, hidden: mx.array) -> mx.array:
        return self.lm_head(self.norm(hidden))

    def sample_starts(self, mask: mx.array) -> mx.array:
        """All positions."""
        batch, length = mask.shape
        return mx.broadcast_to(mx.arange(1, length + 1), (batch, length))

    def _join(self, states: mx.array) -> mx.array:
        """Hidden states [B, L, n * width] as the input [B, L, width] of a layer."""
        if self.config.norm_before_fc:
            states = self.input_norm(states)
        return self.fc(states)

    def _causal(
        self, tokens: mx.array, hidden: mx.array, cache: list | None = None
    ) -> tuple[mx.array, list[KeysValues]]:
        """Outputs [B, L, width], and keys and values of every layer."""
        embeddings = self._target.embed(tokens)
        keys_values = []
        for layer, layer_cache in zip(
            self.layers, cache or [None] * len(self.layers), strict=True
        ):
            hidden, of_layer = layer(embeddings, hidden, layer_cache)
            keys_values.append(of_layer)
        return hidden, keys_values

    # The reduced vocabulary

    @property
    def draft_vocab_size(self) -> int:
        return self.config.draft_vocab_size

    @property
    def draft_ids(self) -> mx.array | None:
        if "d2t" not in self:
            return None
        count = self.draft_vocab_size
        draft_ids = mx.full(self._vocab_size, count, mx.int32)
        tokens = self.target_tokens(mx.arange(count))
        return draft_ids.at[tokens].add(mx.arange(count) - count)

    @property
    def _vocab_size(self) -> int:
        """Tokens of the target, which may have more than the drafter was made for."""
        if self._target is None:
            return self.config.vocab_size
        return max(self.config.vocab_size, self._target.vocab_size)

    def target_tokens(self, draft_ids: mx.array) -> mx.array:
        return draft_ids + self.d2t[draft_ids] if "d2t" in self else draft_ids

    def target_logits(self, logits: mx.array) -> mx.array:
        if "d2t" not in self:
            return logits
        tokens = self.target_tokens(mx.arange(self.draft_vocab_size))
        tokens = mx.broadcast_to(tokens, logits.shape)
        wide = mx.full((*logits.shape[:-1], self._vocab_size), -mx.inf, logits.dtype)
        return mx.put_along_axis(wide, tokens, logits, axis=-1)

    # Files

    @classmethod
    def matches(cls, config: dict) -> bool:
        is_eagle3 = config.get("speculators_model_type") == "eagle3"
        return is_eagle3 or bool({SPECULATORS, *SGLANG} & {*architectures(config)})

    def to_config(self) -> dict:
        return self.config.model_copy(update={"layer_ids": self.layer_ids}).to_json()

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Stored weights under the names of the parameters.

        Raises:
            UserError: `d2t` does not lead to distinct tokens, or not to those of `t2d`.
        """
        weights = {
            name.removeprefix("model.").replace(SGLANG_LAYER, "layers.0."): value
            for name, value in weights.items()
        }
        mask = weights.pop("t2d", None)
        if "d2t" in weights:
            if "d2t" in self:
                weights["d2t"] = weights["d2t"].astype(mx.int32)
                tokens = np.array(weights["d2t"]) + np.arange(len(weights["d2t"]))
                size, distinct = self.config.vocab_size, {*tokens.tolist()}
                is_valid = min(distinct) >= 0 and max(distinct) < size
                is_valid = is_valid and len(distinct) == len(tokens)
                if is_valid and mask is not None:
                    marked = np.flatnonzero(np.array(mask))
                    is_valid = np.array_equal(marked, np.sort(tokens))
                if not is_valid:
                    raise UserError(
                        "d2t of the drafter's files does not name the tokens that it "
                        "can draft",
                        hint="d2t[d] is the token of draft id d, minus d",
                    )
            elif not weights["d2t"].any():
                del weights["d2t"]
        return {
            name: value
            for name, value in weights.items()
            if name not in TARGET_WEIGHTS and not name.endswith("rotary_emb.inv_freq")
        }

    def export_weights(self) -> dict[str, mx.array]:
        """The parameters, with the embedding of the target and `t2d`."""
        weights = dict(tree_flatten(self.parameters()))
        vocab_size = self.config.vocab_size
        if "d2t" in self:
            weights["t2d"] = self.draft_ids[:vocab_size] < self.draft_vocab_size
        embeddings = [
            self._target.embed(tokens[None])[0]
            for tokens in mx.split(
                mx.arange(vocab_size), range(CHUNK, vocab_size, CHUNK)
            )
        ]
        return weights | {"embed_tokens.weight": mx.concatenate(embeddings)}
