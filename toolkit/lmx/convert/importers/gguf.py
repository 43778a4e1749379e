"""llama.cpp's GGUF models of the Llama and Qwen families, by mlx-lm's names."""

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import UserError
from ..gguf import import_blocks, import_tokenizer, reader
from ..gguf.reader import Tensor
from .affine_repack import Groups

# mlx-lm's names of the architectures, and whether llama.cpp reorders q and k in them.
ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}
NAMES = {
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
TENSOR = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
FREQUENCIES = "rope_freqs.weight"
# The stretchings of Llama 3.1 and 3.2, of which a file holds only what they come to.
LLAMA3_FACTORS = (8.0, 32.0)
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(
    path: Path, companions: Path
) -> tuple[dict, dict[str, mx.array], dict[str, Groups]]:
    """Config, dense tensors and quantized layers of a file, by mlx-lm's names.

    Args:
        companions: an empty folder, which gets the tokenizer.

    Raises:
        UserError: a damaged file, an architecture, type or tokenizer not known here.
    """
    metadata, tensors = reader.read(path)
    try:
        config = _config(metadata, tensors)
        import_tokenizer.write(metadata, companions, beside=path.parent)
        return config, *_weights(tensors, config)
    except KeyError as error:
        raise UserError(f"the file has no {error}", place=str(path)) from error
    except UserError as error:
        raise UserError(error.message, place=str(path), hint=error.hint) from error


def is_quantized(path: Path) -> bool:
    """Whether a file has tensors that become groups of codes.

    Raises:
        UserError: a damaged file, or a type not known here.
    """
    _, tensors = reader.read(path)
    return any(tensor.kind in import_blocks.GROUPED for tensor in tensors.values())


def _config(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> dict:
    kind = metadata["general.architecture"]
    if kind not in ARCHITECTURES or metadata.get(f"{kind}.expert_count"):
        experts = " with experts" * bool(metadata.get(f"{kind}.expert_count"))
        raise UserError(
            f"GGUF files of {kind} models{experts} are not read here",
            hint=f"architectures that are: {', '.join(ARCHITECTURES)}",
        )
    if metadata.get("split.count", 1) > 1:
        raise UserError(
            "this file is one of several",
            hint="join them with llama-gguf-split --merge",
        )

    def own(name: str, default: Any = None) -> Any:
        found = metadata.get(f"{kind}.{name}", default)
        if found is None:
            raise KeyError(f"{kind}.{name}")
        return found

    width, heads = own("embedding_length"), own("attention.head_count")
    head = own("attention.key_length", own("rope.dimension_count", width // heads))
    config = {
        "model_type": kind,
        "hidden_size": width,
        "intermediate_size": own("feed_forward_length"),
        "num_hidden_layers": own("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": own("attention.head_count_kv", heads),
        "head_dim": head,
        "max_position_embeddings": own("context_length"),
        "rms_norm_eps": own("attention.layer_norm_rms_epsilon"),
        "rope_theta": own("rope.freq_base", 10000.0),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
    return (
        config
        | _rope(metadata, kind, tensors, config)
        | import_tokenizer.ends(metadata)
    )


def _rope(
    metadata: dict[str, Any], kind: str, tensors: dict[str, Tensor], config: dict
) -> dict:
    """The config's entry on how positions are stretched, if they are."""
    scaling = metadata.get(f"{kind}.rope.scaling.type", "none")
    if scaling == "linear":
        factor = metadata[f"{kind}.rope.scaling.factor"]
        return {"rope_scaling": {"type": "linear", "factor": factor}}
    if scaling != "none":
        raise UserError(f"positions stretched by {scaling!r} are not read here")
    if FREQUENCIES not in tensors:
        return {}
    stored = np.array(import_blocks.dense(tensors[FREQUENCIES]).astype(mx.float32))
    for factor in LLAMA3_FACTORS:
        if np.allclose(stored, llama3(config, factor), rtol=1e-4):
            scaling = {"rope_type": "llama3", "factor": factor}
            return {"rope_scaling": scaling | LLAMA3}
    raise UserError(f"{FREQUENCIES} stretches positions in a way not known here")


def llama3(config: dict, factor: float) -> np.ndarray:
    """What wavelengths are divided by: 1 if short, `factor` if long, between else.

    Llama 3.1's rule with its bounds, which mlx-lm takes when a config names none:
    1 and 4 periods within 8192 positions.
    """
    steps = np.arange(0, config["head_dim"], 2) / config["head_dim"]
    periods = 8192 / (2 * np.pi * config["rope_theta"] ** steps)
    smooth = np.clip((periods - 1) / 3, 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _weights(
    tensors: dict[str, Tensor], config: dict
) -> tuple[dict[str, mx.array], dict[str, Groups]]:
    dense, layers = {}, {}
    for name, tensor in tensors.items():
        if name == FREQUENCIES:
            continue
        path, leaf = _path(name)
        order = _row_order(path, tensor, config)
        grouped = import_blocks.groups(tensor)
        if grouped:
            layers[path] = grouped if order is None else grouped.rows(order)
        else:
            value = import_blocks.dense(tensor)
            value = value if order is None else value[mx.array(order)]
            dense[f"{path}.{leaf}"] = value
    return dense, layers


def _path(name: str) -> tuple[str, str]:
    """mlx-lm's path of the layer, and weight or bias."""
    found = TENSOR.fullmatch(name)
    if not found or found[2] not in NAMES:
        raise UserError(f"the tensor {name} has no place in mlx-lm's model")
    block = f"model.layers.{found[1]}." if found[1] else ""
    return block + NAMES[found[2]], found[3]


def _row_order(path: str, tensor: Tensor, config: dict) -> np.ndarray | None:
    """Rows of q and k as Hugging Face has them: of every head the first half of the
    rotated pairs, then the second; llama.cpp puts the two of a pair side by side."""
    head = config["head_dim"]
    reordered = path.endswith(("self_attn.q_proj", "self_attn.k_proj"))
    if not reordered or not ARCHITECTURES[config["model_type"]]:
        return None
    rows = np.arange(tensor.shape[0]).reshape(-1, head // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)
