"""Tiny EAGLE-3 drafters, and a NumPy float64 forward pass of one round."""

import mlx.core as mx
import numpy as np
from lmx.config.draft import DrafterConfig
from lmx.models.drafters.base import TargetHead
from lmx.models.drafters.eagle3 import Eagle3Drafter
from lmx.models.hooks import forward_with_hidden_states
from mlx.utils import tree_flatten, tree_map
from tiny_families import SHAPE, VOCABULARY

DRAFT_VOCABULARY, LAYER_IDS = 60, [0, 1]
WIDTH = SHAPE["hidden_size"]


def tiny_drafter(target, *, vocab_size=VOCABULARY, counts=None, **changes):
    """A random drafter for a tiny target, with weights that are all different."""
    settings = {"draft_vocab_size": DRAFT_VOCABULARY, "layer_ids": LAYER_IDS} | changes
    mx.random.seed(7)
    drafter = Eagle3Drafter.for_target(
        SHAPE,
        DrafterConfig(**settings),
        width=WIDTH,
        vocab_size=vocab_size,
        num_blocks=len(target.layers),
    )
    if counts is None:
        counts = np.random.default_rng(0).integers(0, 9, vocab_size)
    drafter.choose_vocabulary(counts)
    drafter.update(
        tree_map(
            lambda w: w + 0.2 * mx.random.normal(w.shape),
            drafter.trainable_parameters(),
        )
    )
    return drafter.bind(TargetHead(target))


def states_of(target, tokens, drafter):
    """The hidden states of all tokens [B, L + 1] but the last."""
    return forward_with_hidden_states(target, tokens[:, :-1], drafter.layer_ids)[1]


def fitted_drafter(target, tokens, **changes):
    """A drafter whose LM head is fitted to a text, so that many draft tokens are right.

    The features of the drafter stay random; the head is a ridge regression.
    """
    counts = np.bincount(tokens, minlength=VOCABULARY)
    drafter = tiny_drafter(target, counts=counts, **changes)
    text = mx.array([tokens])
    depth, rows = 3, len(tokens) - 1
    starts = mx.arange(1, rows - depth + 1)[None]
    hidden = drafter.draft_hidden(
        text, states_of(target, text, drafter), starts, depth
    )[0]
    features = np.array(drafter.norm(hidden), np.float64).reshape(-1, WIDTH)
    places = np.arange(2, 2 + starts.size)[:, None] + np.arange(depth)
    labels = np.array(tokens)[places]
    if (draft_ids := drafter.draft_ids) is not None:
        labels = np.array(draft_ids)[labels]
    targets = np.eye(drafter.draft_vocab_size)[labels.flatten()]
    gram = features.T @ features + 1e-4 * np.eye(WIDTH)
    weights = np.linalg.solve(gram, features.T @ targets)
    drafter.lm_head.weight = mx.array(20 * weights.T.astype(np.float32))
    return drafter


class Reference:
    """One round of a drafter in NumPy float64, one row after the other.

    Args:
        parameters: float64 arrays in place of those of the drafter.
    """

    def __init__(self, drafter, parameters=None):
        self.config = drafter.config
        self.embed = drafter._target.embed
        self.parameters = parameters or float64(drafter)

    def logits(self, tokens, states, start, num_draft_tokens):
        """Draft logits [K, N] of the round that starts at position `start`."""
        embeddings = np.array(self.embed(tokens[None]), np.float64)[0]
        states = np.array(states, np.float64)[:start]
        if self.config.norm_before_fc:
            states = self._norm("input_norm", states)
        rows = list(states @ self.parameters["fc.weight"].T)
        logits = []
        for number in range(num_draft_tokens):
            outputs = self._layers(embeddings[1 : len(rows) + 1], np.array(rows))
            if not number:
                # The states of the rows stay; drafted rows are added after them.
                drafted = []
            drafted.append(outputs[-1])
            rows.append(outputs[-1])
            normalized = self._norm("norm", outputs[-1])
            logits.append(normalized @ self.parameters["lm_head.weight"].T)
        return np.array(logits)

    def _layers(self, embeddings, hidden):
        for index in range(self.config.num_hidden_layers):
            name = f"layers.{index}"
            residual = hidden
            if index:
                x = self._norm(f"{name}.input_layernorm", hidden)
            else:
                x = self._norm(f"{name}.hidden_norm", hidden)
                residual = x if self.config.norm_before_residual else hidden
                embeddings = self._norm(f"{name}.input_layernorm", embeddings)
                x = np.concatenate([embeddings, x], axis=-1)
            hidden = residual + self._attention(f"{name}.self_attn", x)
            x = self._norm(f"{name}.post_attention_layernorm", hidden)
            gate = self._linear(f"{name}.mlp.gate_proj", x)
            up = self._linear(f"{name}.mlp.up_proj", x)
            x = gate / (1 + np.exp(-gate)) * up
            hidden = hidden + self._linear(f"{name}.mlp.down_proj", x)
        return hidden

    def _attention(self, name, x):
        config, length = self.config, len(x)
        size = config.head_dim
        queries, keys, values = (
            self._linear(f"{name}.{part}_proj", x).reshape(length, -1, size)
            for part in "qkv"
        )
        queries, keys = rotated(queries), rotated(keys)
        groups = config.num_attention_heads // config.num_key_value_heads
        outputs = np.zeros((length, config.num_attention_heads, size))
        for row in range(length):
            for head in range(config.num_attention_heads):
                of_head = head // groups
                scores = keys[: row + 1, of_head] @ queries[row, head] / np.sqrt(size)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                outputs[row, head] = weights @ values[: row + 1, of_head]
        return self._linear(f"{name}.o_proj", outputs.reshape(length, -1))

    def _linear(self, name, x):
        y = x @ self.parameters[f"{name}.weight"].T
        bias = self.parameters.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _norm(self, name, x):
        mean = (x**2).mean(axis=-1, keepdims=True)
        scale = self.parameters[f"{name}.weight"]
        return scale * x / np.sqrt(mean + self.config.rms_norm_eps)


def float64(drafter):
    """Copies of the parameters."""
    return {
        name: np.array(value, np.float64)
        for name, value in tree_flatten(drafter.parameters())
    }


def rotated(x, base=1e4):
    """Rotary positions from 0 for x [L, heads, size]; halves are rotated together."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * base ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )
