"""A pruned model computes what its target does without the removed blocks."""

import mlx.core as mx
import pytest
from lmx.draft.pruning import (
    most_important_blocks,
    prune,
    pruned_config,
    rank_layers,
    skip_layers,
)
from lmx.draft.report import require_servable
from lmx.errors import UserError
from lmx.models.loader import build_model
from mlx.utils import tree_flatten
from tiny_families import member

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


def test_prune_depth_matches_skip_layers():
    model = model_of(CONFIG)
    config = pruned_config(CONFIG, (0, 3))
    draft = build_model(config)
    weights = dict(tree_flatten(model.parameters()))
    draft.load_weights(list(prune(model, weights, (0, 3)).items()))
    assert mx.allclose(draft(TOKENS), skip_layers(model, [1, 2])(TOKENS), atol=1e-6)
    assert config["num_hidden_layers"] == len(config["layer_types"]) == 2


def test_most_important_blocks_keeps_last_in_order():
    assert most_important_blocks([2, 0, 3, 1], 2) == (1, 3)


@pytest.mark.parametrize(
    ("config", "message"), [(CONFIG, "no block 4"), ({}, "no num_hidden_layers")]
)
def test_pruned_config_rejects_blocks_that_are_not_there(config, message):
    with pytest.raises(UserError, match=message):
        pruned_config(config, (0, 4))


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


def test_blocks_that_do_nothing_are_the_least_important():
    model = build_model(CONFIG | {"num_hidden_layers": 6})
    for index in (2, 4):
        idle = model.model.layers[index]
        idle.self_attn.o_proj.weight *= 0
        idle.mlp.down_proj.weight *= 0
    assert set(rank_layers(model, TOKENS)[:2]) == {2, 4}


def test_a_model_that_needs_its_blocks_is_refused():
    model = member("gemma3_text")
    with pytest.raises(UserError, match="with fewer layers"):
        skip_layers(model, [1])
