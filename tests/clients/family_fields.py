"""Tiny configs of the families that transformers and mlx-lm have, one field changed.

The values come from the type of a field. Those that a type does not give are in tables.
"""

import dataclasses
import pkgutil
from collections.abc import Iterator

import mlx_lm.models
import torch
from mlx_lm.utils import MODEL_REMAPPING
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 96
TOKENS = torch.randint(3, VOCABULARY, (2, 24), generator=torch.manual_seed(0))
# A value per name; a family has those that its config class declares.
SMALL = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    "num_key_value_heads": 2,
    "head_dim": 8,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    # Experts.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("num_shared_experts", "n_shared_experts"), 1),
    "moe_num_experts": 8,
    "moe_num_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "zero_expert_num": 2,
    "ffn_hidden_size": 48,
    # Latent attention.
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    "qk_rope_head_dim": 8,
    "index_head_dim": 16,
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 8),
    "index_n_heads": 32,
    "index_topk": 64,
    # State spaces and linear attention.
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("num_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("mamba_expand", "expand"), 2),
    **dict.fromkeys(("conv_kernel", "mamba_d_conv", "conv1d_width"), 3),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 4),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "block_size"), 8),
    "mamba_d_ssm": 64,
    "linear_num_value_heads": 4,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    "linear_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "short_conv_kernel_size": 3,
    # The rest.
    **dict.fromkeys(("sliding_window", "attention_window_size"), 64),
    "attention_chunk_size": 64,
    "query_pre_attn_scalar": 16,
    "rotary_dim": 4,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "global_head_dim": 16,
    "dim_model_base": 16,
    "block_multiple_of": 16,
    "laurel_rank": 4,
    "altup_num_inputs": 2,
}
WINDOWED = ["sliding_attention", "full_attention"]
MIXED = ["linear_attention", "full_attention"]


def families() -> list[str]:
    known = [module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)]
    both = {*known, *MODEL_REMAPPING} & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    return sorted(both)


# A language part in a model of images: what the names of its tensors begin with.
WRAPPED = dict.fromkeys(("gemma4", "qwen3_5", "qwen3_5_moe"), "model.language_")
WRAPPED |= dict.fromkeys(("gemma3", "llama4"), "language_model.")
LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "minicpm3")
HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
ALTERNATING = ("gemma3_text", "cohere2", "gemma3", "olmo3", "afmoe", "exaone4")
OWN = {
    **{name: {"num_key_value_heads": 4} for name in LATENT},
    **{name: {"layer_types": MIXED} for name in HYBRID},
    **{name: {"layer_types": WINDOWED} for name in ALTERNATING},
    **{
        name: {
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 8,
            "num_hidden_layers": 4,
            "tie_word_embeddings": name == "llama4_text",
        }
        for name in ("llama4", "llama4_text")
    },
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 1e4},
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe", "mlp"],
        "num_hidden_layers": 4,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "recurrent_gemma": {
        "block_types": ["recurrent", "attention"],
        "conv1d_width": 4,
        "num_key_value_heads": 1,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "gpt_neox": {"intermediate_size": 128},
    "laguna": {"gating": True},
    "deepseek_v2": {"num_key_value_heads": 4, "norm_topk_prob": False},
    "qwen2_moe": {"norm_topk_prob": False},
    "mamba2": {"head_dim": 16},
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
}
OTHER_LAYOUT = "transformers' config and tensors have another layout than mlx-lm's"
# Families of both programs that are not compared, and why.
NOT_COMPARED = {
    "bitnet": "mlx-lm reads packed weights of 2 bits only",
    "gemma3n": "transformers writes no keys and values of layers that share them",
    "gemma4_unified": "mlx-lm has no class of its language part",
    "minimax": "mlx-lm has the code of MiniMax M2 under this name",
    "olmo": "mlx-lm needs the package ai2-olmo",
    **dict.fromkeys(
        (
            *("bailing_hybrid", "exaone_moe", "glm_moe_dsa", "kimi_linear"),
            *("longcat_flash", "mimo_v2_flash", "nanochat", "olmo_hybrid"),
            "solar_open",
        ),
        OTHER_LAYOUT,
    ),
}
# mlx-lm has the other approximation of GELU, or rounds the scale of embeddings;
# transformers limits the steps of Nemotron H on a CPU, and not elsewhere.
ROUGH = dict.fromkeys(
    (
        *("gemma", "gemma3", "gemma3_text", "gpt_bigcode", "gpt_neox", "starcoder2"),
        *("recurrent_gemma", "gemma4", "gemma4_text", "llama4", "nemotron_h"),
    ),
    4e-3,
)

# Values that the type of a field does not give.
OTHER = {
    **dict.fromkeys(("hidden_act", "mlp_hidden_act", "hidden_activation"), "relu"),
    **dict.fromkeys(("activation_function", "mamba_hidden_act"), "relu"),
    **dict.fromkeys(("clip_qkv", "attn_logit_softcapping"), 0.5),
    "final_logit_softcapping": 1.0,
    **dict.fromkeys(("sliding_window", "attention_window_size"), 4),
    "index_topk": 4,
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 2),
    "attention_chunk_size": 4,
    "use_bidirectional_attention": True,
    "layers_block_type": ["attention", "mamba", "mlp", "moe"],
    "block_types": ["attention", "recurrent"],
    "no_rope_layers": [0, 1],
    "mlp_only_layers": [0],
    "full_attn_idxs": [0],
    "moe_layers": [0],
    "mlp_layer_types": ["sparse", "dense"],
    "position_embedding_type": "nope",
    "topk_method": "group_limited_greedy",
    "time_step_limit": [0.3, 0.6],
    "mlp_multipliers": [0.5, 2.0],
    "ssm_multipliers": [0.5, 2.0, 0.7, 1.5, 1.2],
    "num_attention_heads_per_layer": [4, 8],
    "activation_sparsity_pattern": [0.0, 0.5, 0.0, 0.0],
    "moe_router_logit_softcapping": 0.5,
    "moe_layer_end_index": 0,
    "mamba_d_ssm": 32,
    "n_inner": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = {
    "rope_theta": {"rope_theta": 77.0},
    "partial_rotary_factor": {"partial_rotary_factor": 0.75},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": YARN | LLAMA3,
    "yarn": YARN,
    "attention_factor": YARN | {"attention_factor": 2.0},
    "truncate": YARN | {"truncate": False},
    "mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "beta": YARN | {"beta_fast": 8, "beta_slow": 2},
}
# Of tasks, of training, of the library and of its code for CPUs.
NO_TRIALS = {field.name for field in dataclasses.fields(PreTrainedConfig)} | {
    *("vocab_size", "initializer_range", "use_cache", "output_router_logits"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"),
    *("time_step_min", "time_step_max", "use_mamba_kernels", "chunk_size"),
    "nemotron_h.time_step_limit",
}


def text_class(family: str) -> type[PreTrainedConfig]:
    """The config class of the language model."""
    kind = CONFIG_MAPPING[family]
    return kind.sub_configs.get("text_config", kind)


def base(family: str) -> dict:
    declared = {field.name for field in dataclasses.fields(text_class(family))}
    own = {key: value for key, value in SMALL.items() if key in declared}
    return own | OWN.get(family, {})


def variants(family: str) -> Iterator[tuple[str, dict]]:
    """The names of fields and configs in which only this field differs."""
    settings = base(family)
    defaults = text_class(family)(**settings)
    for field in dataclasses.fields(text_class(family)):
        # Gemma 4 refuses to give one value for layers of several kinds.
        name, value = field.name, vars(defaults).get(field.name)
        if {name, f"{family}.{name}"} & NO_TRIALS:
            continue
        if name == "rope_parameters":
            for rope, changes in ROPES.items() if value else ():
                inner = value.get("full_attention", value)
                new = inner | changes
                new = value | {"full_attention": new} if inner is not value else new
                yield rope, settings | {name: new}
            continue
        for other in _others(name, value):
            yield name, settings | {name: other}


def _others(name: str, value) -> list:
    if name in OTHER:
        return [OTHER[name]]
    if name == "num_experts_per_tok":
        return [1, 3]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value, value + 1, *([value // 2] * (value > 3))]
    if isinstance(value, float):
        return [value / 2 + 0.01]
    if isinstance(value, list | tuple):
        return [[*value[::-1]]]
    return []
