"""Tiny Qwen3.5 checkpoints with a multi-token-prediction head, as published."""

import json
import shutil

import mlx.core as mx
from lmx.models.drafters.mtp import MTPHead
from lmx.models.loader import build_model
from mlx.utils import tree_flatten

VOCABULARY = 320
WIDTH = 64
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
    },
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "mtp_num_hidden_layers": 1,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
# Not in a text_config.
QWEN3_NEXT = EXPERTS | {
    "model_type": "qwen3_next",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.25,
}
NORMS = (
    "layernorm.weight",
    "q_norm.weight",
    "k_norm.weight",
    "model.norm.weight",
    "mtp.norm.weight",
    "pre_fc_norm_embedding.weight",
    "pre_fc_norm_hidden.weight",
)


def config(**changes) -> dict:
    if "model_type" in changes:
        return TEXT | changes
    kind = "qwen3_5_moe" if "num_experts" in changes else "qwen3_5"
    text = TEXT | changes | {"model_type": f"{kind}_text"}
    return {"model_type": kind, "text_config": text, "eos_token_id": [2, 0]}


def tiny_mtp(*, scale=0.1, **changes):
    """A model and its head, with random weights that differ from their defaults."""
    settings, mx_keys = config(**changes), iter(mx.random.split(mx.random.key(5), 999))
    # The weights of convolutions stay as they were initialized.
    mx.random.seed(3)
    model = build_model(settings)
    head = MTPHead(settings, model)
    for module in (model, head):
        weights = []
        for name, value in tree_flatten(module.parameters()):
            noise = scale * mx.random.normal(value.shape, key=next(mx_keys))
            is_kept = value.ndim == 1 or "conv1d" in name
            weights.append((name, value + noise if is_kept else noise))
        module.load_weights(weights)
        module.eval()
    mx.eval(model.parameters(), head.parameters())
    return model, head, settings


def published_weights(model, head, dtype=mx.float32) -> dict:
    """Names and values as in Hugging Face's files: norms are offsets from one."""
    weights = {}
    for name, value in tree_flatten(model.parameters()):
        name = name.replace("language_model.model", "model.language_model")
        weights[name.removeprefix("language_model.")] = value
    weights |= {f"mtp.{k}": v for k, v in tree_flatten(head.parameters())}
    for name, value in list(weights.items()):
        block, _, layer = name.partition("switch_mlp.")
        if name.endswith(NORMS):
            weights[name] = value - 1
        elif "conv1d" in name:
            weights[name] = value.swapaxes(1, 2)
        elif layer == "gate_proj.weight":
            parts = [value, weights.pop(f"{block}switch_mlp.up_proj.weight")]
            joined = mx.concatenate(parts, axis=-2)
            weights[f"{block}experts.gate_up_proj"] = joined
            del weights[name]
        elif layer == "down_proj.weight":
            weights[f"{block}experts.down_proj"] = weights.pop(name)
    return {name: value.astype(dtype) for name, value in weights.items()}


def write_published(folder, tokenizer_folder, *, dtype=mx.float32, **changes):
    """Write a checkpoint as Hugging Face publishes it; returns the model and head."""
    model, head, settings = tiny_mtp(**changes)
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    weights = published_weights(model, head, dtype)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    return model, head, settings
