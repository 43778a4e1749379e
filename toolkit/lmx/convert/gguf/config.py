"""The config of a Llama or Qwen model as the metadata of a GGUF file."""

from typing import Any

import numpy as np

from ...errors import FAILED, UserError
from ...models.loader import model_classes
from ..importers import gguf as foreign

# llama.cpp's names of the architectures, by mlx-lm's.
ARCHITECTURES = {"mistral": "llama"} | {name: name for name in foreign.ARCHITECTURES}


def metadata(config: dict) -> dict[str, Any]:
    """Keys and values that llama.cpp makes the model of.

    Raises:
        UserError: another architecture, or what llama.cpp's one does not compute.
    """
    kind = ARCHITECTURES.get(config["model_type"])
    if kind is None or "model_file" in config:
        raise UserError(
            f"{config['model_type']} models are not written as GGUF here",
            hint=f"architectures that are: {', '.join(ARCHITECTURES)}",
            code=FAILED,
        )
    own = model_classes(config)[1].from_dict(config)
    if "sliding_attention" in (getattr(own, "layer_types", None) or []):
        raise _refused("layers that see a window only")
    if getattr(own, "rope_traditional", False):
        raise _refused("rotation of neighbouring pairs")
    head = head_size(config)
    found = {
        "context_length": own.max_position_embeddings,
        "embedding_length": own.hidden_size,
        "feed_forward_length": own.intermediate_size,
        "block_count": own.num_hidden_layers,
        "attention.head_count": own.num_attention_heads,
        "attention.head_count_kv": own.num_key_value_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": float(own.rms_norm_eps),
        "rope.dimension_count": head,
        "rope.freq_base": float(own.rope_theta),
        "vocab_size": own.vocab_size,
    }
    rope, factor = _rope(own.rope_scaling)
    if rope == "linear":
        found |= {"rope.scaling.type": rope, "rope.scaling.factor": factor}
    if missing := [key for key, value in found.items() if value is None]:
        raise UserError(f"the config says nothing of {missing[0]}", code=FAILED)
    general = {"general.architecture": kind}
    return general | {f"{kind}.{key}": value for key, value in found.items()}


def frequencies(config: dict) -> np.ndarray | None:
    """What Llama 3's wavelengths are divided by, float32 [head / 2]; None = nothing."""
    own = model_classes(config)[1].from_dict(config)
    rope, factor = _rope(own.rope_scaling)
    if rope != "llama3":
        return None
    settings = {"head_dim": head_size(config), "rope_theta": own.rope_theta}
    return foreign.llama3(settings, factor).astype(np.float32)


def head_size(config: dict) -> int:
    """Numbers of an attention head."""
    heads = config["num_attention_heads"]
    return config.get("head_dim") or config["hidden_size"] // heads


def _rope(scaling: dict | None) -> tuple[str, float]:
    """How positions are stretched, and by how much."""
    scaling = scaling or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    factor = float(scaling.get("factor", 1.0))
    if kind == "llama3":
        bounds = {key: scaling.get(key, v) for key, v in foreign.LLAMA3.items()}
        if bounds != foreign.LLAMA3 or factor not in foreign.LLAMA3_FACTORS:
            raise _refused(f"positions stretched by {scaling}")
    elif kind not in ("default", "linear"):
        raise _refused(f"positions stretched by {kind!r}")
    return kind, factor


def _refused(what: str) -> UserError:
    return UserError(f"a model with {what} is not written as GGUF here", code=FAILED)
