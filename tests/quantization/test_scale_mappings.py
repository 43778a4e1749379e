"""Mappings exist for every architecture and preserve the block output."""

from dataclasses import replace
from functools import partial

import mlx.core as mx
import pytest
from lmx.models.blockwise import BlockwiseModel
from lmx.models.loader import build_model
from lmx.quantization.ptq.channel_scales.scale_mappings import (
    find_mappings,
    preserves_output,
)
from mlx.utils import tree_flatten, tree_unflatten
from tiny_families import VOCABULARY, config, member

# Both query heads share their values.
ATTENTION = {"input_layernorm": "q_proj k_proj v_proj", "v_proj": "o_proj"}
UP = {"up_proj": "down_proj"}
MLP = UP | {"post_attention_layernorm": "gate_proj up_proj"}
MAPPINGS = {
    "llama": MLP | ATTENTION,
    "qwen3": MLP | ATTENTION,
    "gemma": MLP | ATTENTION,
    "gemma3_text": ATTENTION | UP | {"pre_feedforward_layernorm": "gate_proj up_proj"},
    "qwen3_moe": ATTENTION
    | UP
    | {"post_attention_layernorm": "gate gate_proj up_proj"},
    "deepseek_v3": MLP
    | {"input_layernorm": "kv_a_proj_with_mqa q_a_proj", "q_a_layernorm": "q_b_proj"},
    "phi": {"input_layernorm": "fc1 q_proj k_proj v_proj", "v_proj": "dense"},
    "phi3": {
        "input_layernorm": "qkv_proj",
        "qkv_proj": "o_proj",
        "post_attention_layernorm": "gate_up_proj",
        "gate_up_proj": "down_proj",
    },
    "cohere": UP
    | {
        "input_layernorm": "gate_proj up_proj q_proj k_proj v_proj",
        "v_proj": "o_proj",
    },
    "olmo2": UP | {"v_proj": "o_proj"},
    "gpt2": {"ln_1": "c_attn", "ln_2": "c_fc", "c_attn": "c_proj"},
}


def block_of(model, seed):
    """Return the first block of a model, its forward function and its float32 input."""
    blockwise = BlockwiseModel(model.eval())
    tokens = mx.random.randint(0, VOCABULARY, (2, 8), key=mx.random.key(seed))
    run = partial(blockwise.run_block, 0, tokens)
    return blockwise.blocks[0], run, blockwise.embed(tokens)


def layer_name(path: str) -> str:
    return path.rpartition(".")[2]


def consumers_by_producer(mappings):
    return {
        layer_name(m.producer): {layer_name(path) for path in m.consumers}
        for m in mappings
    }


@pytest.mark.parametrize("family", MAPPINGS)
def test_mappings_preserve_the_output_under_any_scale(family):
    model = member(family)
    mappings = find_mappings(*block_of(model, 1))
    expected = {k: set(v.split()) for k, v in MAPPINGS[family].items()}
    assert consumers_by_producer(mappings) == expected
    block, run, hidden = block_of(model, 2)
    before = run(hidden)
    original = dict(tree_flatten(block.parameters()))
    for power in (0.05, 0.5, 1.0):
        weights = original
        for mapping in mappings:
            key = mx.random.key(len(mapping.producer))
            scale = mx.exp(2 * power * mx.random.normal(mapping.shape, key=key))
            weights = weights | mapping.apply(weights, scale)
        block.update(tree_unflatten(list(weights.items())))
        changed = {
            name for name, value in weights.items() if value is not original[name]
        }
        norms = {name for name in changed if original[name].ndim == 1}
        producers = {mapping.producer for mapping in mappings}
        assert {name.rpartition(".")[0] for name in norms} <= producers
        error = mx.linalg.norm(run(hidden) - before)
        assert (error <= 1e-5 * mx.linalg.norm(before)).item()


@pytest.mark.parametrize("num_heads", [1, 2, 4])
def test_v_proj_feeds_o_proj_also_if_heads_share_values(num_heads):
    heads = {"num_attention_heads": 4, "head_dim": 8, "num_key_value_heads": num_heads}
    model = build_model(config("llama") | heads)
    [values] = [
        mapping
        for mapping in find_mappings(*block_of(model, 1))
        if layer_name(mapping.producer) == "v_proj"
    ]
    assert [layer_name(path) for path in values.consumers] == ["o_proj"]
    assert (values.width, values.repeats) == (8 * num_heads, 4 // num_heads)
    if values.repeats > 1:
        scale = mx.arange(values.width)
        heads = values.columns(scale).reshape(4, 8) // 8
        assert heads[:, 0].tolist() == [i * num_heads // 4 for i in range(4)]
        assert mx.array_equal(values.channels(values.columns(scale)), scale)


def test_preserves_output_rejects_wrong_mappings():
    sample = block_of(member("gemma"), 1)
    mappings = find_mappings(*sample)
    assert all(preserves_output([mapping], *sample) for mapping in mappings)
    norm = mappings[0]
    assert norm.offset == 1
    assert not preserves_output([replace(norm, offset=0)], *sample)
    assert not preserves_output([replace(norm, consumers=norm.consumers[1:])], *sample)
    assert not preserves_output(
        [*mappings, replace(norm, producer="self_attn.q_proj")], *sample
    )


def test_find_mappings_restores_the_block():
    block, run, hidden = block_of(member("llama"), 1)
    before = dict(tree_flatten(block.parameters()))
    find_mappings(block, run, hidden)
    after = dict(tree_flatten(block.parameters()))
    assert all(mx.array_equal(after[name], value) for name, value in before.items())


def test_layers_that_are_not_called_exclude_their_width():
    """The indexer selects tokens only if there are more than its window."""
    mappings = find_mappings(*block_of(member("deepseek_v32"), 1))
    assert "input_layernorm" not in consumers_by_producer(mappings)
    mappings = find_mappings(*block_of(member("deepseek_v32", window=2), 1))
    assert "weights_proj" in consumers_by_producer(mappings)["input_layernorm"]


def test_round_scale_gives_weights_that_the_dtype_represents():
    block, run, hidden = block_of(member("gemma"), 1)
    mapping = find_mappings(block, run, hidden)[0]
    weights = dict(tree_flatten(block.parameters()))
    scale = mx.exp(mx.random.normal((mapping.width,), key=mx.random.key(3)))
    name = f"{mapping.producer}.weight"
    rounded = mapping.round_scale(weights, scale, mx.bfloat16)
    assert mx.allclose(rounded, scale, rtol=0.05)
    scaled = mapping.apply(weights, rounded)[name]
    assert mx.allclose(scaled, scaled.astype(mx.bfloat16), rtol=1e-6, atol=1e-6)
    unrounded = mapping.apply(weights, scale)[name]
    assert not mx.allclose(
        unrounded, unrounded.astype(mx.bfloat16), rtol=1e-6, atol=1e-6
    )
