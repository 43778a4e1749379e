"""Drafters start with the last blocks of their target."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from lmx.config.draft import DrafterConfig
from lmx.models.drafters.io import ARCHITECTURES, bind_target
from lmx.models.loader import build_model
from tiny_checkpoints import LLAMA

CONFIG = LLAMA | {"num_hidden_layers": 3}
WIDTH = LLAMA["hidden_size"]


def bound(architecture, target, **settings):
    settings = {"num_layers": 2} | settings
    drafter = ARCHITECTURES[architecture].for_target(
        CONFIG,
        DrafterConfig(**settings),
        width=WIDTH,
        vocab_size=LLAMA["vocab_size"],
        num_blocks=3,
        mask_token_id=0,
    )
    return bind_target(drafter, target, place="drafter")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("bits", [None, 4])
def test_blocks_of_the_target_are_copied(architecture, bits):
    mx.random.seed(0)
    target = build_model(CONFIG)
    target.model.norm.weight = mx.random.normal((WIDTH,))
    for block in target.layers:
        block.post_attention_layernorm.weight = mx.random.normal((WIDTH,))
    if bits:
        nn.quantize(target, bits=bits, group_size=64)
    drafter = bound(architecture, target)
    random_weights = mx.array(drafter.layers[1].mlp.up_proj.weight)
    drafter.initialize()
    for layer, block in zip(drafter.layers, target.layers[1:], strict=True):
        assert mx.array_equal(
            layer.post_attention_layernorm.weight, block.post_attention_layernorm.weight
        )
        source = block.mlp.up_proj
        expected = source.weight
        if bits:
            tensors = (source.weight, source.scales, source.biases)
            expected = mx.dequantize(*tensors, bits=bits, group_size=64)
        assert mx.allclose(layer.mlp.up_proj.weight, expected, atol=1e-6)
    # The control: they were not there before.
    assert not mx.allclose(drafter.layers[1].mlp.up_proj.weight, random_weights)
    assert mx.array_equal(drafter.norm.weight, target.model.norm.weight)
    assert mx.array_equal(drafter.fc.weight[:, -WIDTH:], mx.eye(WIDTH))


def test_first_eagle3_layer_keeps_room_for_the_embedding():
    mx.random.seed(0)
    target = build_model(CONFIG)
    drafter = bound("eagle3", target, num_layers=1)
    drafter.initialize()
    weight = drafter.layers[0].self_attn.q_proj.weight
    source = target.layers[-1].self_attn.q_proj.weight
    assert mx.array_equal(weight[:, WIDTH:], source)
    assert 0 < mx.abs(weight[:, :WIDTH]).max().item() < mx.abs(source).max().item()


def test_other_targets_leave_random_weights():
    """A block with other names or sizes: nothing is copied, and nothing fails."""
    mx.random.seed(0)
    target = build_model(CONFIG | {"intermediate_size": 192})
    drafter = bound("dflash", target)
    before = mx.array(drafter.layers[0].mlp.up_proj.weight)
    drafter.initialize()
    assert mx.array_equal(drafter.layers[0].mlp.up_proj.weight, before)
