"""Tiny configurations of mlx-lm's architecture families."""

import mlx.core as mx
from lmx.models.loader import build_model
from mlx.utils import tree_map_with_path

VOCABULARY = 96
WINDOW = 8

# The keys have the same meaning in every family; each family uses its own subset.
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "partial_rotary_factor": 0.5,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
DEEPSEEK_EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT_ATTENTION = {
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
SHORT_CONVOLUTIONS = {
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 32,
    "block_multiple_of": 16,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "block_ff_dim": 48,
    "full_attn_idxs": [1],
}
YARN = {
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
}
SLIDING = {"sliding_window": WINDOW, "sliding_window_pattern": 2}
LOCAL_AND_GLOBAL = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
GATED_DELTA = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "full_attention_interval": 2,
}
GRANITE = {
    "logits_scaling": 1.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
}
MAMBA2 = {
    "state_size": 8,
    "ssm_state_size": 8,
    "conv_kernel": 3,
    "use_conv_bias": True,
    "n_groups": 1,
    "time_step_limit": [0.001, 100.0],
}
GEMMA4 = SLIDING | {
    "use_double_wide_mlp": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "tie_word_embeddings": True,
}

# One family of every kind that mlx-lm can build and differentiate.
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen2_moe": EXPERTS
    | {"shared_expert_intermediate_size": 16, "norm_topk_prob": False},
    "qwen3_next": EXPERTS
    | GATED_DELTA
    | {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "shared_expert_intermediate_size": 16,
    },
    "qwen3_5": {"text_config": SHAPE | GATED_DELTA | {"model_type": "qwen3_5"}},
    "qwen3_5_moe": {
        "text_config": SHAPE
        | GATED_DELTA
        | EXPERTS
        | {"shared_expert_intermediate_size": 16, "model_type": "qwen3_5_moe_text"}
    },
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 16, "final_logit_softcapping": 2.0},
    "gemma3_text": SLIDING | {"query_pre_attn_scalar": 16},
    "gemma3": {
        "text_config": SHAPE
        | SLIDING
        | {"query_pre_attn_scalar": 16, "model_type": "gemma3_text"}
    },
    "gemma3n": {
        "text_config": SHAPE
        | LOCAL_AND_GLOBAL
        | {
            "model_type": "gemma3n_text",
            "num_hidden_layers": 4,
            "layer_types": 2 * LOCAL_AND_GLOBAL["layer_types"],
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 2,
            "altup_active_idx": 0,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
            "final_logit_softcapping": 30.0,
            "rope_local_base_freq": 1e4,
        }
    },
    "gemma4_text": GEMMA4,
    "gemma4": {"text_config": SHAPE | GEMMA4 | {"model_type": "gemma4_text"}},
    "phi": {},
    "phi3": {},
    "phimoe": {"num_local_experts": 4},
    "mistral": LOCAL_AND_GLOBAL,
    "ministral3": LOCAL_AND_GLOBAL
    | {
        "rope_parameters": {
            "rope_theta": 1e4,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 16,
        }
    },
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2} | LOCAL_AND_GLOBAL,
    "deepseek_v2": DEEPSEEK_EXPERTS
    | LATENT_ATTENTION
    | YARN
    | {"norm_topk_prob": False},
    "deepseek_v3": DEEPSEEK_EXPERTS | LATENT_ATTENTION,
    "deepseek_v32": DEEPSEEK_EXPERTS
    | LATENT_ATTENTION
    | {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 8},
    "glm4": {},
    "glm4_moe": DEEPSEEK_EXPERTS | {"use_qk_norm": True, "rope_scaling": None},
    "cohere": {"logit_scale": 1.0},
    "cohere2": SLIDING | {"logit_scale": 1.0},
    "olmo2": {},
    "olmo3": LOCAL_AND_GLOBAL,
    "olmoe": EXPERTS,
    "starcoder2": {},
    "stablelm": {"use_qkv_bias": False},
    "granite": GRANITE,
    "gpt2": {"n_ctx": 256, "n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 256},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.25},
    "smollm3": {},
    "exaone4": LOCAL_AND_GLOBAL
    | {"rope_scaling": None, "sliding_window_pattern": "LG"},
    "mamba": {
        "state_size": 8,
        "conv_kernel": 3,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    "mamba2": MAMBA2 | {"num_heads": 4, "head_dim": 16, "time_step_rank": 4},
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_d_state": 8,
        "mamba_n_heads": 2,
        "mamba_d_head": 16,
        "mamba_chunk_size": 8,
    },
    "granitemoehybrid": GRANITE
    | {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_proj_bias": False,
        "mamba_d_state": 8,
        "mamba_d_conv": 3,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
    },
    "nemotron_h": MAMBA2
    | DEEPSEEK_EXPERTS
    | {
        "hybrid_override_pattern": "M*-E",
        "num_hidden_layers": 4,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "moe_shared_expert_intermediate_size": 16,
    },
    "lfm2": SHORT_CONVOLUTIONS,
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 3,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "kimi_linear": EXPERTS
    | LATENT_ATTENTION
    | {
        "q_lora_rank": None,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "model_max_length": 256,
        "linear_attn_config": {
            "kda_layers": [1],
            "full_attn_layers": [2],
            "num_heads": 2,
            "head_dim": 16,
            "short_conv_kernel_size": 3,
        },
    },
    "rwkv7": {
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "recurrent_gemma": {
        "conv1d_width": 4,
        "rms_norm_eps": 1e-6,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention"],
    },
    "llama4_text": {
        "intermediate_size_mlp": 48,
        "no_rope_layers": [1, 0],
        "use_qk_norm": True,
    },
    "baichuan_m1": {
        "sliding_window": WINDOW,
        "sliding_window_layers": [0],
        "conv_window": 2,
    },
    "minimax": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "rotary_dim": 8,
        "head_dim": 16,
    },
    "ernie4_5": {},
    "nemotron": {"hidden_act": "relu2"},
    "hunyuan_v1_dense": {},
    "plamo2": {"hidden_size_per_head": 16, "mamba_d_state": 8, "mamba_num_heads": 2},
    "afmoe": LOCAL_AND_GLOBAL
    | EXPERTS
    | {"num_shared_experts": 1, "num_dense_layers": 1},
    "longcat_flash": LATENT_ATTENTION
    | {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "ffn_hidden_size": 48,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 16,
        "n_routed_experts": 4,
        "zero_expert_num": 1,
        "num_layers": 2,
        "routed_scaling_factor": 1.0,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "openelm": {
        "num_transformer_layers": 2,
        "model_dim": 32,
        "ffn_dim_divisor": 16,
        "num_query_heads": [2, 2],
        "num_kv_heads": [1, 1],
        "ffn_multipliers": [1.5, 2.0],
    },
    "apertus": {"post_norm": True, "qk_norm": True},
    "olmo_hybrid": GATED_DELTA
    | {
        "linear_allow_neg_eigval": True,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2_moe": EXPERTS
    | {
        "use_expert_bias": True,
        "num_dense_layers": 1,
        "conv_bias": False,
        "conv_L_cache": 3,
        "full_attn_idxs": [1],
    },
    "hunyuan": {
        "moe_topk": 2,
        "num_experts": 4,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"factor": 1.0, "alpha": 1.0, "type": "dynamic"},
    },
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_intermediate_size": 16,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 0,
        "moe_layer_end_index": 1,
    },
    "bailing_hybrid": DEEPSEEK_EXPERTS
    | LATENT_ATTENTION
    | EXPERTS
    | {"num_shared_experts": 1, "layer_group_size": 2, "group_norm_size": 1},
    "kimi_k25": {
        "text_config": SHAPE
        | DEEPSEEK_EXPERTS
        | LATENT_ATTENTION
        | {"model_type": "deepseek_v3"}
    },
    "nanbeige": {"num_loops": 2},
    "plamo3": {
        "window_size": WINDOW,
        "sliding_window_pattern": 2,
        "rope_local_theta": 1e4,
    },
}

# Families that mlx-lm cannot train on a CPU, or only in part; see the tests.
OTHERS = {
    "afm7": {
        "hidden_dim": 32,
        "num_layers": 2,
        "num_kv_reuse_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
    },
    "bitnet": {},
    "dbrx": {
        "d_model": 32,
        "n_heads": 2,
        "n_layers": 2,
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 1, "rope_theta": 1e4},
    },
}

WINDOWS = (
    "sliding_window",
    "attention_window_size",
    "window_size",
    "index_topk",
)
ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token")


def config(
    family: str, *, window: int = WINDOW, active_experts: int | None = None
) -> dict:
    settings = SHAPE | (FAMILIES | OTHERS)[family] | {"model_type": family}
    changes = dict.fromkeys(WINDOWS, window)
    if active_experts:
        changes |= dict.fromkeys(ACTIVE_EXPERTS, active_experts)
    return changed(settings, changes)


def alternating(first, second) -> list[tuple]:
    """Each family with one of two choices. Its relatives have the other one."""
    return [(name, (first, second)[n % 2]) for n, name in enumerate(FAMILIES)]


def changed(settings: dict, changes: dict) -> dict:
    """With other values of the keys that the family has."""
    known = {k: v for k, v in changes.items() if k in settings}
    if "text_config" in settings:
        known["text_config"] = changed(settings["text_config"], changes)
    return settings | known


def member(family: str, **changes):
    """A model of the family, with weights at which gradients do not vanish."""
    mx.random.seed(1)
    model = build_model(config(family, **changes))
    keys = iter(mx.random.split(mx.random.key(2), 4096))

    def off(path, value):
        return value + 0.05 * mx.random.normal(value.shape, key=next(keys))

    model.update(tree_map_with_path(off, model.parameters()))
    return model
