"""select_layers: the quantized layers and their grids."""

import mlx.nn as nn
import pytest
from lmx.config import quantize
from lmx.config.quant_spec import QuantizationConfig, QuantSpec
from lmx.errors import UserError
from lmx.models.loader import build_model
from lmx.quantization.target_layers import select_layers
from pydantic import ValidationError
from tiny_checkpoints import LLAMA, QWEN3_MOE

UNTIED = LLAMA | {"tie_word_embeddings": False}
GRID = QuantSpec(bits=4, group_size=64)
BLOCK = {f"self_attn.{x}_proj" for x in "qkvo"} | {
    f"mlp.{x}_proj" for x in ("gate", "up", "down")
}
BLOCK = {f"model.layers.0.{path}" for path in BLOCK}
DOWN = "model.layers.0.mlp.down_proj"
ACTIVATIONS = {"mode": "nvfp4", "quantize_activations": True}


def plan_of(config=LLAMA, **settings):
    return select_layers(build_model(config), QuantizationConfig(**settings))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kept", [(), ("*.embed_tokens",), ("lm_head",)])
def test_embeddings_and_head_follow_the_recipe(tied, kept):
    outside = {"*.embed_tokens": "model.embed_tokens"}
    outside |= {} if tied else {"lm_head": "lm_head"}
    overrides = {pattern: "skip" for pattern in kept if pattern in outside}
    plan = plan_of(LLAMA | {"tie_word_embeddings": tied}, overrides=overrides)
    skipped = {outside[pattern] for pattern in overrides}
    expected = {*BLOCK, *outside.values()} - skipped
    assert plan.specs == dict.fromkeys(expected, GRID)
    assert plan.skipped == dict.fromkeys(skipped, "skipped by the recipe")


def test_layer_with_indivisible_width_is_skipped():
    plan = plan_of(UNTIED | {"intermediate_size": 172})
    reason = "its width 172 is not a multiple of 64"
    assert plan.skipped == {"model.layers.0.mlp.down_proj": reason}
    assert plan.specs.keys() == (BLOCK - plan.skipped.keys()) | {
        "model.embed_tokens",
        "lm_head",
    }


def test_model_without_quantizable_layers_is_refused():
    sizes = {"hidden_size": 172, "head_dim": 43, "intermediate_size": 44}
    with pytest.raises(UserError) as caught:
        plan_of(LLAMA | sizes)
    assert "its width 172 is not a multiple of 64" in caught.value.message
    with pytest.raises(UserError, match="no linear layer"):
        select_layers(nn.RMSNorm(8), QuantizationConfig())


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "nvfp4", "mxfp8"])
def test_quant_predicate_of_the_model_is_used(mode):
    """A router is affine with 8 bits, independent of the recipe."""
    plan = plan_of(QWEN3_MOE, mode=mode)
    router = QuantSpec(bits=8, group_size=64)
    grids = {
        path: spec for path, spec in plan.specs.items() if path.endswith("mlp.gate")
    }
    assert grids == {f"model.layers.{n}.mlp.gate": router for n in range(2)}
    other_specs = {grid for path, grid in plan.specs.items() if path not in grids}
    assert len(other_specs) == 1
    assert other_specs.pop().mode == mode
    assert "model.layers.0.mlp.switch_mlp.up_proj" in plan.specs


@pytest.mark.parametrize(
    ("predicate_result", "grid"),
    [
        ({"bits": 8}, QuantSpec(bits=8, group_size=32)),
        ({"mode": "mxfp8"}, QuantSpec(mode="mxfp8")),
        ({"group_size": 128, "bits": 6}, QuantSpec(bits=6, group_size=128)),
    ],
)
def test_quant_predicate_is_completed_by_the_recipe(predicate_result, grid):
    model = build_model(LLAMA)
    type(model).quant_predicate = property(
        lambda _: (
            lambda path, module: (
                predicate_result if "o_proj" in path else "up" not in path
            )
        )
    )
    try:
        plan = select_layers(model, QuantizationConfig(bits=3, group_size=32))
    finally:
        del type(model).quant_predicate
    assert plan.specs["model.layers.0.self_attn.o_proj"] == grid
    assert plan.specs["model.embed_tokens"] == QuantSpec(bits=3, group_size=32)
    assert plan.skipped == {
        "model.layers.0.mlp.up_proj": "skipped by the model's predicate"
    }


def test_pattern_matches_full_paths_and_paths_in_the_block():
    override = {"bits": 8}
    for pattern in (DOWN, "*.down_proj", "mlp.down_proj", "mlp.d*"):
        specs = plan_of(overrides={pattern: override}).specs
        eight = [path for path, spec in specs.items() if spec.bits == 8]
        assert eight == [DOWN], pattern
    overrides = {"self_attn.*": "skip", "*.self_attn.o_proj": override}
    assert len(plan_of(overrides=overrides).skipped) == 4


def test_first_matching_pattern_wins_and_is_completed():
    overrides = {
        DOWN: {"bits": 8},
        "mlp.*": {"group_size": 128},
        "*": {"mode": "mxfp8"},
    }
    specs = plan_of(overrides=overrides, bits=3, group_size=32).specs
    assert specs[DOWN] == QuantSpec(bits=8, group_size=32)
    assert specs["model.layers.0.mlp.up_proj"] == QuantSpec(bits=3, group_size=128)
    assert specs["model.layers.0.self_attn.q_proj"] == QuantSpec(mode="mxfp8")


def test_pattern_overrides_predicate():
    """The predicate of this model gives its routers 8 bits."""
    router = "model.layers.0.mlp.gate"
    default = plan_of(QWEN3_MOE)
    assert default.specs[router].bits == 8
    assert default.explicit == {router, router.replace("0", "1")}
    overridden = plan_of(QWEN3_MOE, overrides={"mlp.gate": {"bits": 3}})
    assert overridden.specs[router].bits == 3
    skipped = plan_of(QWEN3_MOE, overrides={"mlp.gate": "skip"}).skipped
    assert skipped[router] == "skipped by the recipe"
    overridden = plan_of(QWEN3_MOE, overrides={"lm_head": {"bits": 6}})
    assert overridden.specs["lm_head"].bits == 6
    assert overridden.explicit == default.explicit | {"lm_head"}


def test_pattern_without_match_lists_the_layers():
    with pytest.raises(
        UserError, match=r"no layer of this model matches '\*\.dwn'"
    ) as caught:
        plan_of(overrides={"*.dwn": {"bits": 4}})
    assert "mlp.down_proj" in caught.value.hint
    assert "model.embed_tokens" in caught.value.hint


@pytest.mark.parametrize(
    "settings",
    [
        *(
            {"overrides": {"*": grid}}
            for grid in ({"bits": 7}, {"bit": 4}, {"mode": "mxfp4", "bits": 3}, "no", 4)
        ),
        {"mixed_precision": {}},
        {"mixed_precision": {"target_bpw": 3.0, "candidate_bits": []}},
        {"mixed_precision": {"target_bpw": 3.0, "candidate_group_sizes": [16]}},
        {"mixed_precision": {"target_bpw": 3.0}, "mode": "mxfp4"},
        {"mode": "affine", "quantize_activations": True},
        {"mode": "mxfp4", "quantize_activations": True},
    ],
    ids=str,
)
def test_invalid_settings_are_refused(settings):
    with pytest.raises(ValidationError):
        quantize.RTNConfig(**settings)


def test_layers_whose_inputs_cannot_be_quantized_are_skipped():
    plan = plan_of(UNTIED | {"attention_bias": True}, **ACTIVATIONS)
    biased = {f"model.layers.0.self_attn.{x}_proj" for x in "qkvo"}
    assert plan.quantize_activations
    assert plan.skipped.keys() == biased
    assert "bias" in plan.skipped[biased.pop()]
    assert plan.specs.keys() >= {DOWN, "lm_head", "model.embed_tokens"}


def test_layers_for_which_the_model_asks_another_mode_are_skipped():
    gate = "model.layers.0.mlp.gate"
    assert plan_of(QWEN3_MOE, mode="mxfp8").specs[gate].bits == 8
    plan = plan_of(QWEN3_MOE, mode="mxfp8", quantize_activations=True)
    assert "mode affine cannot be used" in plan.skipped[gate]
    assert any("switch_mlp" in path for path in plan.specs)


def test_override_without_input_quantization_is_refused():
    overrides = {"*.down_proj": {"mode": "affine", "bits": 8}}
    with pytest.raises(UserError, match="mode affine cannot be used"):
        plan_of(overrides=overrides, **ACTIVATIONS)
    plan = plan_of(overrides={"*.down_proj": {"mode": "mxfp8"}}, **ACTIVATIONS)
    assert plan.specs[DOWN].mode == "mxfp8"
