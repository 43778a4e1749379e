"""Target modules of `auto`: experts, but no routers and no small layers."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from lmx.config.lora import LoRAConfig
from lmx.errors import UserError
from lmx.models.lora import lora_model
from tiny_families import FAMILIES, config, member

ATTENTION = {f"self_attn.{x}_proj" for x in "qkvo"}
LATENT = {f"self_attn.{x}_proj" for x in ("q_a", "q_b", "kv_a", "o") if x != "kv_a"} | {
    "self_attn.kv_a_proj_with_mqa"
}


def glu(*paths):
    return {f"{p}.{x}_proj" for p in paths for x in ("gate", "up", "down")}


# The layers to adapt, read from mlx-lm's code.
EXPECTED = {
    "llama": ATTENTION | glu("mlp"),
    "phi3": {"self_attn.qkv_proj", "self_attn.o_proj"}
    | {"mlp.gate_up_proj", "mlp.down_proj"},
    "gpt2": {f"{x}.c_proj" for x in ("attn", "mlp")} | {"attn.c_attn", "mlp.c_fc"},
    "qwen3_moe": ATTENTION | glu("mlp.switch_mlp"),
    "qwen2_moe": ATTENTION | glu("mlp.switch_mlp", "mlp.shared_expert"),
    "mixtral": ATTENTION | glu("block_sparse_moe.switch_mlp"),
    "gpt_oss": ATTENTION | glu("mlp.experts"),
    "hunyuan": ATTENTION | glu("mlp.switch_mlp", "mlp.shared_mlp"),
    "deepseek_v3": LATENT | glu("mlp", "mlp.switch_mlp", "mlp.shared_experts"),
    "deepseek_v32": LATENT | glu("mlp", "mlp.switch_mlp", "mlp.shared_experts"),
    "afmoe": ATTENTION
    | {"self_attn.gate_proj"}
    | glu("mlp", "mlp.experts", "mlp.shared_experts"),
    "jamba": ATTENTION
    | glu("feed_forward", "feed_forward.switch_mlp")
    | {f"mamba.{x}_proj" for x in ("in", "x", "out")},
    "granitemoehybrid": ATTENTION
    | glu("block_sparse_moe.switch_mlp")
    | {"mamba.in_proj", "mamba.out_proj"}
    | {"shared_mlp.input_linear", "shared_mlp.output_linear"},
    "mamba2": {"mixer.in_proj", "mixer.out_proj"},
    "qwen3_5": ATTENTION
    | glu("mlp")
    | {f"linear_attn.{x}" for x in ("in_proj_qkv", "in_proj_z", "out_proj")},
    "gemma3n": ATTENTION
    | glu("mlp")
    | {"laurel.linear_left", "laurel.linear_right"}
    | {"per_layer_input_gate", "per_layer_projection"},
}


def adapted(family, target_modules="auto", *, rank=3, **changes):
    return set(
        lora_model.attach(
            member(family), LoRAConfig(rank=rank, target_modules=target_modules), seed=0
        )
    )


@pytest.mark.parametrize("family", EXPECTED)
def test_auto_adapts_all_linear_layers_of_the_blocks(family):
    assert adapted(family) == EXPECTED[family]


# Families with experts, and those whose classes lmx repairs.
ROUTED = [family for family in FAMILIES if "expert" in str(config(family))]
REPAIRED = ["gemma3n", "plamo3", "recurrent_gemma"]


@pytest.mark.parametrize("target_modules", ["auto", ["*"]])
@pytest.mark.parametrize("family", [*ROUTED, *REPAIRED])
def test_attach_skips_routers(family, target_modules):
    routers = {"gate", "router", "wg", "classifier", "shared_expert_gate"}
    keys = adapted(family, target_modules, rank=1)
    assert keys
    assert not [key for key in keys if routers & set(key.split("."))]


class Mixture(nn.Module):
    """Experts, a router with an unknown name, and a shared expert."""

    def __init__(self, experts):
        super().__init__()
        self.switch_mlp = member("mixtral").layers[0].block_sparse_moe.switch_mlp
        self.selector = nn.Linear(32, experts)
        self.shared = {"gate_proj": nn.Linear(32, experts)}


class Model(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.layers = [Mixture(experts)]


@pytest.mark.parametrize(("outputs", "router"), [(4, True), (8, False)])
def test_find_target_modules_recognizes_a_router_by_its_outputs(outputs, router):
    keys = lora_model.attach(Model(outputs), LoRAConfig(rank=1), seed=0)
    assert ("selector" not in keys) == router
    assert "shared.gate_proj" in keys
    assert "switch_mlp.up_proj" in keys


def test_find_target_modules_handles_quantized_experts():
    model = member("qwen3_moe")
    nn.quantize(model, group_size=32, bits=4, class_predicate=_wide_enough)
    assert isinstance(model.layers[0].mlp.gate, nn.QuantizedLinear)
    assert (
        set(lora_model.attach(model, LoRAConfig(rank=3), seed=0))
        == EXPECTED["qwen3_moe"]
    )


def _wide_enough(_, module):
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def test_auto_skips_layers_smaller_than_their_adapter():
    """k_proj and v_proj are 32 x 16: 512 weights, 10.7 times 32 + 16."""
    assert "self_attn.k_proj" in adapted("llama", rank=10)
    assert "self_attn.k_proj" not in adapted("llama", rank=11)
    assert "self_attn.k_proj" in adapted("llama", ["*"], rank=11)
    with pytest.raises(UserError, match="rank 64 is too large") as caught:
        adapted("llama", rank=64)
    hint = "a lower rank, or layers by name: lm_head, mlp."
    assert caught.value.hint.startswith(hint)


def test_auto_skips_indexers_and_star_adapts_them():
    indexers = adapted("deepseek_v32", ["*"]) - adapted("deepseek_v32")
    assert indexers == {f"self_attn.indexer.{x}" for x in ("wq_b", "wk")} | {
        "self_attn.indexer.weights_proj"
    }


def test_auto_combines_with_patterns_and_ranks():
    model = member("qwen3_moe")
    target_modules = {"self_attn.q_proj": 2, "auto": 4, "lm_head": 1}
    keys = lora_model.attach(model, LoRAConfig(target_modules=target_modules), seed=0)
    assert set(keys) == EXPECTED["qwen3_moe"] | {"lm_head"}
    ranks = {k: v.lora_b.shape for k, v in lora_model.adapted_layers(model).items()}
    assert ranks["model.layers.0.self_attn.q_proj"] == (2, 32)
    assert ranks["model.layers.0.self_attn.v_proj"] == (4, 16)
    assert ranks["lm_head"][0] == 1
    assert mx.all(lora_model.adapted_layers(model)["lm_head"].lora_b == 0)
