"""Grids by pattern: which layers they mean, and what comes before what."""

import pytest
from lmx.config import quantize
from lmx.config.quant_spec import QuantizationConfig, QuantSpec
from lmx.errors import UserError
from lmx.models.loader import build_model
from lmx.quantization.target_layers import select_layers
from pydantic import ValidationError
from tiny_checkpoints import LLAMA, QWEN3_MOE

DOWN = "model.layers.0.mlp.down_proj"


def chosen(layers, config=LLAMA, **settings):
    return select_layers(
        build_model(config), QuantizationConfig(overrides=layers, **settings)
    )


def test_a_pattern_is_of_the_whole_path_or_of_that_in_the_block():
    grids = {"bits": 8}
    for pattern in (DOWN, "*.down_proj", "mlp.down_proj", "mlp.d*"):
        specs = chosen({pattern: grids}).specs
        eight = [path for path, spec in specs.items() if spec.bits == 8]
        assert eight == [DOWN], pattern
    kept = chosen({"self_attn.*": "skip", "*.self_attn.o_proj": grids}).kept
    assert len(kept) == 4


def test_the_first_match_counts_and_the_block_completes_it():
    layers = {DOWN: {"bits": 8}, "mlp.*": {"group_size": 128}, "*": {"mode": "mxfp8"}}
    specs = chosen(layers, bits=3, group_size=32).specs
    assert specs[DOWN] == QuantSpec(bits=8, group_size=32)
    assert specs["model.layers.0.mlp.up_proj"] == QuantSpec(bits=3, group_size=128)
    assert specs["model.layers.0.self_attn.q_proj"] == QuantSpec(mode="mxfp8")


def test_a_pattern_is_above_the_models_wish_and_the_switches():
    """A router of this model asks for 8 bits."""
    gate = "model.layers.0.mlp.gate"
    plain = chosen({}, QWEN3_MOE)
    assert plain.specs[gate].bits == 8
    assert plain.asked == {gate, gate.replace("0", "1")}
    named = chosen({"mlp.gate": {"bits": 3}}, QWEN3_MOE)
    assert named.specs[gate].bits == 3
    assert chosen({"mlp.gate": "skip"}, QWEN3_MOE).kept[gate] == "the recipe says so"
    both = chosen({"lm_head": {"bits": 6}}, QWEN3_MOE, quantize_lm_head=False)
    assert both.specs["lm_head"].bits == 6
    assert both.asked == plain.asked | {"lm_head"}


def test_a_pattern_that_means_nothing_names_what_there_is():
    with pytest.raises(
        UserError, match=r"no layer of this model matches '\*\.dwn'"
    ) as caught:
        chosen({"*.dwn": {"bits": 4}})
    assert "mlp.down_proj" in caught.value.hint
    assert "model.embed_tokens" in caught.value.hint


@pytest.mark.parametrize(
    "grid", [{"bits": 7}, {"bit": 4}, {"mode": "mxfp4", "bits": 3}, "leave", 4]
)
def test_grids_that_are_none(grid):
    with pytest.raises(ValidationError):
        QuantizationConfig(overrides={"*": grid})


@pytest.mark.parametrize(
    "wrong",
    [
        {"mixed_precision": {}},
        {"mixed_precision": {"target_bytes": 1e6, "target_bpw": 3.0}},
        {"mixed_precision": {"target_bpw": 3.0, "candidate_bits": []}},
        {"mixed_precision": {"target_bpw": 3.0, "candidate_group_sizes": [16]}},
        {"mixed_precision": {"target_bpw": 3.0}, "mode": "mxfp4"},
    ],
)
def test_budgets_that_are_none(wrong):
    with pytest.raises(ValidationError):
        quantize.RTNConfig(**wrong)
