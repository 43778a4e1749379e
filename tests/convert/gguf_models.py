"""Tiny configs of the architectures of the GGUF export, with unusual values."""

from tiny_checkpoints import QWEN3_MOE

BASE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": [2, 0],
}
LINEAR = {"rope_scaling": {"type": "linear", "factor": 4.0}}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# mlx-lm and transformers have no defaults for models without windows.
EXAONE4 = {
    "rope_scaling": None,
    "sliding_window": None,
    "sliding_window_pattern": None,
    "layer_types": ["full_attention"] * 4,
}
# mlx-lm rounds Gemma's factor of embeddings, the root of the hidden size, to bfloat16.
GRANITE = LINEAR | {
    "attention_bias": False,
    "logits_scaling": 3.0,
    "attention_multiplier": 0.4,
    "embedding_multiplier": 5.0,
    "residual_multiplier": 0.3,
}
DEEPSEEK_EXPERTS = {
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "routed_scaling_factor": 1.5,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "rope_scaling": None,
}
SQUARE = {"hidden_size": 64, "tie_word_embeddings": True}
MODELS = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"rope_scaling": YARN},
    "qwen3": {"head_dim": 32} | LINEAR,
    "mistral": {"head_dim": 32, "rope_scaling": YARN},
    "qwen3_moe": QWEN3_MOE,
    "mixtral": {"head_dim": None, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma": SQUARE | {"head_dim": 32},
    "gemma2": SQUARE
    | {
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "sliding_window": 128,
    },
    "gemma3_text": SQUARE
    | {
        "tie_word_embeddings": False,
        "num_hidden_layers": 7,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 12,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 500.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "phi3": {"hidden_size": 128},
    "phi3 longrope": {
        "model_type": "phi3",
        # llama.cpp chooses the factors by the size of its context, at least 256.
        "original_max_position_embeddings": 256,
        "max_position_embeddings": 1024,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 9.0],
            "short_factor": [1.0, 1.0, 1.0, 1.0, 1.5, 2.0],
        },
    },
    "granite": GRANITE | {"attention_bias": True, "mlp_bias": False},
    "smollm3": {"num_hidden_layers": 5},
    "olmo2": LINEAR,
    "olmo3": {"sliding_window": 12, "rope_scaling": YARN},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "ernie4_5": {"use_bias": False},
    "seed_oss": {"attention_bias": True, "attention_out_bias": False},
    "starcoder2": {"norm_epsilon": 1e-4, "tie_word_embeddings": True},
    "cohere2": {
        "layer_norm_eps": 1e-4,
        "logit_scale": 0.25,
        "sliding_window": 12,
        "sliding_window_pattern": 4,
        "num_hidden_layers": 5,
        "tie_word_embeddings": True,
    },
    "nemotron": LINEAR
    | {"hidden_act": "relu2", "norm_eps": 1e-4, "partial_rotary_factor": 0.5},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "exaone4": EXAONE4 | {"rope_scaling": LLAMA3_SCALING | {"factor": 16.0}},
    "exaone4 windows": EXAONE4
    | {
        "model_type": "exaone4",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 64,
        "sliding_window": 12,
        "sliding_window_pattern": "LLLG",
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16,
    },
    "stablelm": {
        "layer_norm_eps": 1e-4,
        "partial_rotary_factor": 0.25,
        "use_qkv_bias": True,
    },
    "gpt_oss": {
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 12,
        "rope_scaling": YARN,
    },
    "cohere": {
        "layer_norm_eps": 1e-4,
        "logit_scale": 0.25,
        "tie_word_embeddings": True,
    },
    "phi": {"layer_norm_eps": 1e-4, "partial_rotary_factor": 0.5},
    "mimo": {},
    "granitemoe": GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "ministral3": {
        "head_dim": 32,
        "rope_parameters": YARN
        | {
            "type": "yarn",
            "original_max_position_embeddings": 8,
            "rope_theta": 5000.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "afmoe": {
        "head_dim": 32,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        "sliding_window": 12,
        "moe_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_shared_experts": 2,
        "num_dense_layers": 1,
        "route_norm": True,
        "route_scale": 1.5,
        "mup_enabled": True,
    },
    "glm4_moe_lite": DEEPSEEK_EXPERTS
    | {
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "norm_topk_prob": False,
    },
    "glm4_moe": DEEPSEEK_EXPERTS
    | {
        "head_dim": 32,
        "use_qk_norm": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "hunyuan_v1_dense": {
        "head_dim": 32,
        "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0},
    },
}


# Models with images, whose text part is exported.
TEXT_PARTS = {
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
    "mistral3 yarn": "ministral3",
}


def config_of(name):
    if name in TEXT_PARTS:
        text = config_of(TEXT_PARTS[name])
        return {
            "model_type": name.split()[0],
            "text_config": text,
            "vocab_size": 320,
        } | {"eos_token_id": [2, 0]}
    return BASE | {"model_type": name} | MODELS[name]


NAMES = (*MODELS, *TEXT_PARTS)


def interleave_rows(rows, heads):
    """Reorder rows of q_proj or k_proj as llama.cpp's converter does."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)
