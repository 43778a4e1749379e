"""Pruned models compute the same where only idle layers or channels are removed."""

import mlx.core as mx
import pytest
from lmx.draft.pruning import (
    PrunedShape,
    channel_importance,
    most_important,
    most_important_blocks,
    prune,
    pruned_config,
)
from lmx.draft.report import require_servable
from lmx.errors import UserError
from lmx.generation.speculative.layer_skip import skip_layers
from lmx.models.loader import build_model
from mlx.utils import tree_flatten

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 50,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "layer_types": ["full_attention"] * 4,
}
TOKENS = mx.array([[1, 7, 3, 3, 9, 40, 22, 5]])


def model_of(config):
    mx.random.seed(0)
    model = build_model(config)
    mx.eval(model.parameters())
    return model


def pruned(model, shape, importance=None):
    weights = dict(tree_flatten(model.parameters()))
    config = pruned_config(CONFIG, shape)
    draft = build_model(config)
    draft.load_weights(list(prune(model, weights, shape, importance).items()))
    return draft, config


def test_prune_depth_matches_skip_layers():
    model = model_of(CONFIG)
    draft, config = pruned(model, PrunedShape((0, 3)))
    assert mx.allclose(draft(TOKENS), skip_layers(model, [1, 2])(TOKENS), atol=1e-6)
    assert config["num_hidden_layers"] == len(config["layer_types"]) == 2


def test_prune_intermediate_removes_idle_channels():
    model = model_of(CONFIG)
    idle = mx.arange(48) % 3 == 0
    for layer in model.layers:
        for name in ("gate_proj", "up_proj"):
            weight = layer.mlp[name].weight
            layer.mlp[name].weight = mx.where(idle[:, None], 0.0, weight)
    importance = channel_importance(model, TOKENS)
    shape = PrunedShape((0, 1, 2, 3), intermediate_size=32)
    draft, _ = pruned(model, shape, importance)
    assert mx.allclose(draft(TOKENS), model(TOKENS), atol=1e-5)


def test_prune_hidden_keeps_most_active_channels():
    model = model_of(CONFIG)
    idle = mx.arange(32) % 4 == 1
    model.model.embed_tokens.weight *= mx.where(idle, 0.0, 1.0)
    for layer in model.layers:
        for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
            part.weight *= mx.where(idle, 0.0, 1.0)[:, None]
    importance = channel_importance(model, TOKENS)
    assert not idle[most_important(importance.hidden, 24)].any()
    shape = PrunedShape((0, 1, 2, 3), hidden_size=24)
    draft, config = pruned(model, shape, importance)
    assert config["head_dim"] == 16
    # Only the mean square of the norms differs: it is over fewer channels.
    for layer in draft.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight *= (32 / 24) ** 0.5
            norm.eps *= 32 / 24
    draft.model.norm.weight *= (32 / 24) ** 0.5
    draft.model.norm.eps *= 32 / 24
    assert mx.allclose(draft(TOKENS), model(TOKENS), atol=1e-4)


def test_most_important_blocks_keeps_last_in_order():
    assert most_important_blocks([2, 0, 3, 1], 2) == (1, 3)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (PrunedShape((0, 4)), "no block 4"),
        (PrunedShape((0,), hidden_size=64), "from 32 to 64"),
    ],
)
def test_pruned_config_rejects_larger_shapes(shape, message):
    with pytest.raises(UserError, match=message):
        pruned_config(CONFIG, shape)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_position_embeddings": 64}, "positions"),
        ({"vocab_size": 49}, "49 rows"),
        ({"model_file": "own.py"}, "its own code"),
    ],
)
def test_require_servable_rejects_incompatible_drafts(changes, message):
    require_servable(CONFIG, CONFIG, 50, place="here")
    with pytest.raises(UserError, match=message):
        require_servable(CONFIG | changes, CONFIG, 50, place="here")


def test_require_servable_rejects_sliding_windows():
    window = {
        "model_type": "gemma3_text",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 50,
        "sliding_window": 16,
        "sliding_window_pattern": 3,
        "max_position_embeddings": 128,
    }
    with pytest.raises(UserError, match="full attention"):
        require_servable(window, CONFIG, 50, place="here")
