"""llama.cpp's GGUF models of the Llama and Qwen families, by mlx-lm's names."""

import re
from pathlib import Path

import mlx.core as mx
import numpy as np

from ...errors import UserError
from ..gguf import blocks, config, reader, tokenizer
from ..gguf.reader import GGUFTensor
from .affine_repack import AffineGroups

# mlx-lm's module paths by llama.cpp's names; those of a block are relative to it.
MODULE_PATHS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TENSOR_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


def read(
    path: Path, companions: Path
) -> tuple[dict, dict[str, mx.array], dict[str, AffineGroups]]:
    """Config, dense tensors and quantized layers of a file, by mlx-lm's names.

    Args:
        companions: an empty folder, into which the tokenizer is written.

    Raises:
        UserError: the file is damaged, or its architecture, a type or the tokenizer is
            not supported.
    """
    metadata, tensors = reader.read(path)
    try:
        settings = config.from_metadata(metadata, tensors)
        tokenizer.write(metadata, companions, source=path.parent)
        return settings, *_weights(tensors, settings)
    except KeyError as error:
        raise UserError(f"the file has no {error}", place=str(path)) from error
    except UserError as error:
        raise UserError(error.message, place=str(path), hint=error.hint) from error


def is_quantized(path: Path) -> bool:
    """Whether a file has tensors that become quantized layers.

    Raises:
        UserError: the file is damaged, or a type is not supported.
    """
    _, tensors = reader.read(path)
    return any(t.ggml_type in blocks.GROUPED_TYPES for t in tensors.values())


def _weights(
    tensors: dict[str, GGUFTensor], settings: dict
) -> tuple[dict[str, mx.array], dict[str, AffineGroups]]:
    dense, layers = {}, {}
    for name, tensor in tensors.items():
        if name == config.ROPE_FREQUENCIES:
            continue
        path, leaf = _module_path(name)
        order = _row_order(path, tensor, settings)
        groups = blocks.to_affine_groups(tensor)
        if groups:
            layers[path] = groups if order is None else groups.permute_rows(order)
        else:
            value = blocks.to_dense(tensor)
            value = value if order is None else value[mx.array(order)]
            dense[f"{path}.{leaf}"] = value
    return dense, layers


def _module_path(name: str) -> tuple[str, str]:
    """mlx-lm's path of the module, and weight or bias."""
    match = TENSOR_NAME.fullmatch(name)
    if not match or match[2] not in MODULE_PATHS:
        raise UserError(f"mlx-lm's model has no tensor {name}")
    block = f"model.layers.{match[1]}." if match[1] else ""
    return block + MODULE_PATHS[match[2]], match[3]


def _row_order(path: str, tensor: GGUFTensor, settings: dict) -> np.ndarray | None:
    """The rows of q and k in Hugging Face's order for Llama models; else None.

    Hugging Face rotates the two halves of a head; llama.cpp rotates adjacent rows.
    """
    is_qk = path.endswith(("self_attn.q_proj", "self_attn.k_proj"))
    if not is_qk or not config.PERMUTED_QK[settings["model_type"]]:
        return None
    rows = np.arange(tensor.shape[0]).reshape(-1, settings["head_dim"] // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)
