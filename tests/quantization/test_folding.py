"""Folds: found on every kind of architecture, and the block makes what it made."""

from dataclasses import replace
from functools import partial

import mlx.core as mx
import pytest
from lmx.models.blockwise import BlockwiseModel
from lmx.models.loader import build_model
from lmx.quantization.ptq.awq_scaling import POWERS, find_mappings, holds, scale_of
from lmx.quantization.ptq.block_context import set_weights
from mlx.utils import tree_flatten
from tiny_families import VOCABULARY, config, member

ATTENTION = "q_proj k_proj v_proj"
MLP = {"post_attention_layernorm": "gate_proj up_proj", "up_proj": "down_proj"}
PLACES = {
    "llama": MLP | {"input_layernorm": ATTENTION},
    "qwen3": MLP | {"input_layernorm": ATTENTION},
    "gemma": MLP | {"input_layernorm": ATTENTION},
    "gemma3_text": {
        "input_layernorm": ATTENTION,
        "pre_feedforward_layernorm": "gate_proj up_proj",
        "up_proj": "down_proj",
    },
    "qwen3_moe": {
        "input_layernorm": ATTENTION,
        "post_attention_layernorm": "gate gate_proj up_proj",
        "up_proj": "down_proj",
    },
    "deepseek_v3": MLP
    | {
        "input_layernorm": "kv_a_proj_with_mqa q_a_proj",
        "q_a_layernorm": "q_b_proj",
    },
    "phi": {"input_layernorm": "fc1 " + ATTENTION},
    "phi3": {
        "input_layernorm": "qkv_proj",
        "post_attention_layernorm": "gate_up_proj",
        "gate_up_proj": "down_proj",
    },
    "cohere": {
        "input_layernorm": "gate_proj up_proj " + ATTENTION,
        "up_proj": "down_proj",
    },
    "olmo2": {"up_proj": "down_proj"},
    "gpt2": {"ln_1": "c_attn", "ln_2": "c_fc", "c_attn": "c_proj"},
}


def block_of(model, seed):
    """A model's first block, how it is run, and hidden states, float32."""
    blockwise = BlockwiseModel(model.eval())
    tokens = mx.random.randint(0, VOCABULARY, (2, 8), key=mx.random.key(seed))
    run = partial(blockwise.run, 0, tokens)
    return blockwise.blocks[0], run, blockwise.first(tokens)


def last(path: str) -> str:
    return path.rpartition(".")[2]


def places(folds):
    return {last(f.producer): {last(path) for path in f.consumers} for f in folds}


@pytest.mark.parametrize("family", PLACES)
def test_places_are_found_and_any_scale_leaves_the_output(family):
    model = member(family)
    folds = find_mappings(*block_of(model, 1))
    wanted = {k: set(v.split()) for k, v in PLACES[family].items()}
    assert places(folds) == wanted
    block, run, hidden = block_of(model, 2)
    before = run(hidden)
    whole = dict(tree_flatten(block.parameters()))
    for power in (POWERS[0], 0.5, POWERS[-1]):
        weights = whole
        for fold in folds:
            key = mx.random.key(len(fold.producer))
            sizes = mx.exp(2 * mx.random.normal(fold.shape, key=key))
            weights = weights | fold.moved(weights, scale_of(sizes, power))
        set_weights(block, weights)
        changed = {name for name, value in weights.items() if value is not whole[name]}
        norms = {name for name in changed if whole[name].ndim == 1}
        producers = {fold.producer for fold in folds}
        assert {name.rpartition(".")[0] for name in norms} <= producers
        off = mx.linalg.norm(run(hidden) - before)
        assert (off <= 1e-5 * mx.linalg.norm(before)).item()


def test_values_reach_the_output_layer_unless_heads_share_them():
    heads = {"num_key_value_heads": 2}
    shared, alone = (build_model(config("llama") | change) for change in ({}, heads))
    assert "v_proj" not in places(find_mappings(*block_of(shared, 1)))
    assert places(find_mappings(*block_of(alone, 1)))["v_proj"] == {"o_proj"}


def test_a_wrong_fold_is_told_from_a_right_one():
    setting = block_of(member("gemma"), 1)
    folds = find_mappings(*setting)
    assert all(holds([fold], *setting) for fold in folds)
    norm = folds[0]
    assert norm.offset == 1
    assert not holds([replace(norm, offset=0)], *setting)
    assert not holds([replace(norm, consumers=norm.consumers[1:])], *setting)
    assert not holds([*folds, replace(norm, producer="self_attn.q_proj")], *setting)


def test_a_block_is_left_as_it_was():
    block, run, hidden = block_of(member("llama"), 1)
    before = dict(tree_flatten(block.parameters()))
    find_mappings(block, run, hidden)
    after = dict(tree_flatten(block.parameters()))
    assert all(mx.array_equal(after[name], value) for name, value in before.items())


def test_what_some_tokens_do_not_call_is_not_fed_by_a_fold():
    """The indexer picks tokens only where there are more than it picks."""
    folds = find_mappings(*block_of(member("deepseek_v32"), 1))
    assert "input_layernorm" not in places(folds)
    folds = find_mappings(*block_of(member("deepseek_v32", window=2), 1))
    assert "weights_proj" in places(folds)["input_layernorm"]


def test_a_norm_takes_the_scale_that_its_type_has():
    block, run, hidden = block_of(member("gemma"), 1)
    fold = find_mappings(block, run, hidden)[0]
    weights = dict(tree_flatten(block.parameters()))
    scale = mx.exp(mx.random.normal(fold.shape, key=mx.random.key(3)))
    name = f"{fold.producer}.weight"
    near = fold.storable(weights, scale, mx.bfloat16)
    assert mx.allclose(near, scale, rtol=0.05)
    folded = fold.moved(weights, near)[name]
    assert mx.allclose(folded, folded.astype(mx.bfloat16), rtol=1e-6, atol=1e-6)
    plain = fold.moved(weights, scale)[name]
    assert not mx.allclose(plain, plain.astype(mx.bfloat16), rtol=1e-6, atol=1e-6)
