"""llama.cpp's architectures: metadata keys, and what its code fixes.

Both directions use one entry per architecture. Every entry was run in llama.cpp with
random weights and gave MLX's logits; see tests/convert/test_gguf_llama_cpp.py.
"""

from typing import Any

from .architecture import (
    ALL_SPARSE,
    DEEPSEEK_EXPERTS,
    EXPERTS,
    GRANITE,
    LAYER_EPSILON,
    ONE_GROUP,
    SIGMOID_ROUTER,
    WINDOW,
    YARN,
    Architecture,
    exaone4,
    gemma3,
    gemma_scale,
    layer_types,
    smollm3,
)

_ALL = (
    Architecture(
        "llama",
        "LlamaForCausalLM",
        rope="permuted",
        rope_scalings=(*YARN, "llama3"),
    ),
    Architecture(
        "mistral3",
        "Ministral3ForCausalLM",
        model_type="ministral3",
        keys={"attention.temperature_scale": ("llama_4_scaling_beta", float)},
        rope="permuted",
        rope_scalings=("yarn",),
        mscale_all_dim=1,
        has_rope_parameters=True,
        switches={},
        marker="attention.temperature_scale",
        constants={"rope.scaling.yarn_log_multiplier": 1.0},
        fixed=lambda _: {"rope_type": "yarn"},
    ),
    # Only files have this name: older readers know Mistral models as Llama models.
    Architecture(
        "mistral3", "MistralForCausalLM", model_type="mistral", rope="permuted"
    ),
    Architecture(
        "llama",
        "MixtralForCausalLM",
        model_type="mixtral",
        keys=EXPERTS | {"expert_count": ("num_local_experts", int)},
        rope="permuted",
        rope_scalings=(),
        marker="expert_count",
    ),
    Architecture("qwen2", "Qwen2ForCausalLM", rope_scalings=YARN),
    Architecture("qwen3", "Qwen3ForCausalLM", rope_scalings=YARN),
    Architecture(
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        keys=EXPERTS | {"expert_feed_forward_length": ("moe_intermediate_size", int)},
        rope_scalings=(),
        fixed=lambda _: {"norm_topk_prob": True} | ALL_SPARSE,
    ),
    Architecture(
        "qwen2moe",
        "Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        keys=EXPERTS
        | {
            "expert_feed_forward_length": ("moe_intermediate_size", int),
            "expert_shared_feed_forward_length": (
                "shared_expert_intermediate_size",
                int,
            ),
        },
        rope_scalings=(),
        fixed=lambda _: {"norm_topk_prob": False} | ALL_SPARSE,
    ),
    Architecture("gemma", "GemmaForCausalLM", norm_offset=1),
    Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        keys=WINDOW
        | {
            "attn_logit_softcapping": ("attn_logit_softcapping", float),
            "final_logit_softcapping": ("final_logit_softcapping", float),
        },
        norm_offset=1,
        fixed=gemma_scale(46),
    ),
    Architecture(
        "gemma3",
        "Gemma3ForCausalLM",
        model_type="gemma3_text",
        keys=WINDOW | {"rope.freq_base_swa": ("rope_local_base_freq", float)},
        norm_offset=1,
        # mlx-lm's default is that of older files.
        optional=("rope.freq_base_swa",),
        fixed=gemma3,
    ),
    Architecture(
        "phi3",
        "Phi3ForCausalLM",
        has_partial_rope=True,
        rope_scalings=("longrope",),
    ),
    Architecture("granite", "GraniteForCausalLM", keys=GRANITE, rope="permuted"),
    Architecture(
        "granitemoe",
        "GraniteMoeForCausalLM",
        keys=GRANITE | EXPERTS | {"expert_count": ("num_local_experts", int)},
        rope="permuted",
    ),
    Architecture("smollm3", "SmolLM3ForCausalLM", rope="permuted", fixed=smollm3),
    Architecture("olmo2", "Olmo2ForCausalLM"),
    Architecture(
        "olmo2",
        "Olmo3ForCausalLM",
        model_type="olmo3",
        keys=WINDOW,
        # In both, only for layers without a window.
        rope_scalings=("yarn",),
        fixed=layer_types(4),
        marker="attention.sliding_window",
    ),
    Architecture(
        "olmoe",
        "OlmoeForCausalLM",
        keys=EXPERTS,
        fixed=lambda config: {
            "norm_topk_prob": False,
            "num_key_value_heads": config["num_attention_heads"],
        },
    ),
    Architecture(
        "glm4",
        "Glm4ForCausalLM",
        rope="adjacent",
        has_partial_rope=True,
    ),
    Architecture(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        rope="adjacent",
        switches={"use_bias": "attn_q.bias"},
    ),
    Architecture(
        "seed_oss",
        "SeedOssForCausalLM",
        switches={
            "attention_bias": "attn_q.bias",
            "attention_out_bias": "attn_output.bias",
        },
    ),
    Architecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        epsilon=(LAYER_EPSILON, "norm_epsilon"),
    ),
    Architecture(
        "cohere2",
        "Cohere2ForCausalLM",
        keys=WINDOW | {"logit_scale": ("logit_scale", float)},
        epsilon=(LAYER_EPSILON, "layer_norm_eps"),
        rope="adjacent",
        fixed=lambda _: {"sliding_window_pattern": 4},
    ),
    Architecture(
        "command-r",
        "CohereForCausalLM",
        model_type="cohere",
        keys={"logit_scale": ("logit_scale", float)},
        epsilon=(LAYER_EPSILON, "layer_norm_eps"),
        rope="adjacent",
        # Command R+ has norms of queries and keys.
        fixed=lambda _: {"use_qk_norm": False, "layer_norm_bias": False},
    ),
    Architecture(
        "phi2",
        "PhiForCausalLM",
        model_type="phi",
        epsilon=(LAYER_EPSILON, "layer_norm_eps"),
        has_partial_rope=True,
    ),
    Architecture(
        "nemotron",
        "NemotronForCausalLM",
        epsilon=(LAYER_EPSILON, "norm_eps"),
        norm_offset=1,
        has_partial_rope=True,
        fixed=lambda _: {"hidden_act": "relu2"},
    ),
    Architecture(
        "exaone4",
        "Exaone4ForCausalLM",
        keys=WINDOW,
        rope_scalings=("linear", "llama3"),
        optional=("attention.sliding_window",),
        fixed=exaone4,
    ),
    Architecture(
        "stablelm",
        "StableLmForCausalLM",
        epsilon=(LAYER_EPSILON, "layer_norm_eps"),
        switches={"use_qkv_bias": "attn_q.bias"},
        has_partial_rope=True,
        # StableLM 2 12B has other values.
        fixed=lambda _: {"use_parallel_residual": False, "qk_layernorm": False},
    ),
    Architecture(
        "hunyuan-dense",
        "HunYuanDenseV1ForCausalLM",
        model_type="hunyuan_v1_dense",
        # mlx-lm computes only the factor of the base.
        rope_scalings=("dynamic",),
        fixed=lambda _: {"use_qk_norm": True, "attention_bias": False},
    ),
    Architecture(
        "gpt-oss",
        "GptOssForCausalLM",
        model_type="gpt_oss",
        keys=EXPERTS
        | WINDOW
        | {
            "expert_count": ("num_local_experts", int),
            "expert_feed_forward_length": ("intermediate_size", int),
        },
        rope_scalings=YARN,
        fixed=layer_types(2),
    ),
    Architecture(
        "glm4moe",
        "Glm4MoeForCausalLM",
        model_type="glm4_moe",
        keys=DEEPSEEK_EXPERTS,
        rope_scalings=(),
        switches={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
        has_partial_rope=True,
        constants=SIGMOID_ROUTER,
        fixed=lambda _: ONE_GROUP,
    ),
    Architecture(
        "afmoe",
        "AfmoeForCausalLM",
        keys=WINDOW
        | EXPERTS
        | {
            "expert_shared_count": ("num_shared_experts", int),
            "expert_feed_forward_length": ("moe_intermediate_size", int),
            "expert_weights_scale": ("route_scale", float),
            "expert_weights_norm": ("route_norm", bool),
            "leading_dense_block_count": ("num_dense_layers", int),
        },
        rope_scalings=(),
        switches={},
        constants=SIGMOID_ROUTER,
        fixed=lambda config: (
            layer_types(4)(config)
            | {"n_group": 1, "score_func": "sigmoid", "mup_enabled": True}
        ),
    ),
    Architecture(
        "deepseek2",
        "Glm4MoeLiteForCausalLM",
        model_type="glm4_moe_lite",
        keys=DEEPSEEK_EXPERTS
        | {
            "attention.q_lora_rank": ("q_lora_rank", int),
            "attention.kv_lora_rank": ("kv_lora_rank", int),
        },
        rope="adjacent",
        rope_scalings=(),
        switches={},
        has_latent_attention=True,
        constants=SIGMOID_ROUTER | {"expert_group_count": 1},
        fixed=lambda _: (
            ONE_GROUP
            | {
                "moe_layer_freq": 1,
                "attention_bias": False,
                "partial_rotary_factor": 1.0,
            }
        ),
    ),
)
BY_MODEL_TYPE = {entry.model_type: entry for entry in _ALL}
# llama.cpp computes Mistral models as Llama models, and MiMo as Qwen2.
BY_MODEL_TYPE |= {"mistral": BY_MODEL_TYPE["llama"], "mimo": BY_MODEL_TYPE["qwen2"]}


def find_architecture(name: str, metadata: dict[str, Any]) -> Architecture | None:
    """The entry of a file with llama.cpp's name of its architecture, if known."""
    entries = [entry for entry in _ALL if entry.name == name]
    for entry in entries:
        if entry.marker and metadata.get(f"{name}.{entry.marker}"):
            return entry
    return next((entry for entry in entries if not entry.marker), None)


# Models with images, of which mlx-lm computes the text part: its default model type.
WITH_IMAGES = {"gemma3": "gemma3_text", "mistral3": "mistral"}
TEXT_PART = "language_model."
