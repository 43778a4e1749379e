"""Tiny DFlash drafters, random and trained, and their targets."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from lmx.config.draft import DrafterConfig
from lmx.models.drafters.base import TargetHead
from lmx.models.drafters.dflash import DFlashDrafter
from lmx.models.hooks import forward_with_hidden_states
from lmx.models.loader import build_model
from mlx.utils import tree_map
from tiny_families import config as family_config

MASK_TOKEN = 0


def random_target(family="llama", seed=1, **changes):
    """A model and its config, its weights scaled up so that the next token varies."""
    mx.random.seed(0)
    config = family_config(family) | changes
    model = build_model(config)
    mx.random.seed(seed)
    model.update(
        tree_map(
            lambda w: w + 0.25 * mx.random.normal(w.shape).astype(w.dtype),
            model.parameters(),
        )
    )
    mx.eval(model.parameters())
    return model.eval(), config


def random_drafter(model, config, seed=2, **options):
    """A drafter of one layer that drafts 4 tokens; `options` of the drafter config."""
    options = {"num_layers": 1, "num_draft_tokens": 4, "layer_ids": [0, 1]} | options
    mx.random.seed(seed)
    head = TargetHead(model)
    drafter = DFlashDrafter.for_target(
        config,
        DrafterConfig(**options),
        width=head.embed(mx.zeros((1, 1), mx.int32)).shape[-1],
        vocab_size=head.vocab_size,
        num_blocks=config["num_hidden_layers"],
        mask_token_id=MASK_TOKEN,
    )
    mx.eval(drafter.parameters())
    return drafter.bind(head)


def drafter_loss(drafter, tokens, states, starts, labels):
    """Cross-entropy of all draft tokens; -1 = no label."""
    hidden = drafter.draft_hidden(tokens, states, starts, labels.shape[-1])
    losses = nn.losses.cross_entropy(drafter.head(hidden), mx.maximum(labels, 0))
    return mx.where(labels >= 0, losses, 0).sum() / (labels >= 0).sum()


def trained_drafter(model, config, texts, steps=150, **options):
    """A drafter that was trained on texts of equal length."""
    drafter = random_drafter(model, config, **options)
    tokens = mx.array(texts, mx.int32)
    _, states = forward_with_hidden_states(model, tokens[:, :-1], drafter.layer_ids)
    count = drafter.max_draft_tokens
    padded = np.pad(np.array(texts), [(0, 0), (0, count)], constant_values=-1)
    length = tokens.shape[1] - 1
    starts = mx.array(np.tile(np.arange(1, length), (len(texts), 1)))
    labels = np.stack([padded[:, j:][:, 1:length] for j in range(1, count + 1)], -1)
    optimizer = optim.Adam(4e-3)
    step = nn.value_and_grad(drafter, drafter_loss)
    for _ in range(steps):
        _, gradients = step(drafter, tokens, states, starts, mx.array(labels))
        optimizer.update(drafter, gradients)
        mx.eval(drafter.parameters(), optimizer.state)
    return drafter
