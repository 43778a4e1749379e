"""The config of a Llama or Qwen model as GGUF metadata, and back."""

from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import FAILED, UserError
from ...models.loader import model_arguments
from . import blocks, tokenizer
from .reader import GGUFTensor

# mlx-lm's model types that are read, and whether llama.cpp permutes their q and k.
PERMUTED_QK = {"llama": True, "qwen2": False, "qwen3": False}
# llama.cpp's architectures by mlx-lm's model types.
ARCHITECTURES = {"mistral": "llama"} | {name: name for name in PERMUTED_QK}
ROPE_FREQUENCIES = "rope_freqs.weight"
# transformers' classes, which a config.json names.
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# RoPE scaling of Llama 3.1 and 3.2. A file stores only the resulting frequency factors.
LLAMA3_FACTORS = (8.0, 32.0)
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def from_metadata(metadata: dict[str, Any], tensors: dict[str, GGUFTensor]) -> dict:
    """The config.json of a file's model.

    Raises:
        KeyError: a key is missing.
        UserError: the architecture or its RoPE scaling is not supported, or a value is
            of a wrong type or out of range.
    """
    kind = str(metadata["general.architecture"])[:40]
    experts = " with experts" if metadata.get(f"{kind}.expert_count") else ""
    if kind not in PERMUTED_QK or experts:
        raise UserError(
            f"GGUF files of {kind} models{experts} are not supported",
            hint=f"supported architectures: {', '.join(PERMUTED_QK)}",
        )
    if metadata.get("split.count", 1) not in (0, 1):
        raise UserError(
            "this file is one of several",
            hint="join them with llama-gguf-split --merge",
        )

    def value(name: str, default: int | None = None) -> int:
        return _number(metadata, f"{kind}.{name}", int, default)

    def fraction(name: str, default: float | None = None) -> float:
        return _number(metadata, f"{kind}.{name}", float, default)

    hidden_size, heads = value("embedding_length"), value("attention.head_count")
    rope_size = value("rope.dimension_count", hidden_size // heads)
    config = {
        "model_type": kind,
        "architectures": [CLASSES[kind]],
        "hidden_size": hidden_size,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": value("attention.key_length", rope_size),
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": fraction("attention.layer_norm_rms_epsilon"),
        "rope_theta": fraction("rope.freq_base", 10000.0),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
    config |= _rope_from_metadata(metadata, kind, tensors, config)
    return config | tokenizer.special_token_ids(metadata)


def _number(
    metadata: dict[str, Any], key: str, kind: type, default: float | None
) -> Any:
    """A number above zero.

    Raises:
        KeyError: the key is missing, and there is no default.
        UserError: the value is another one.
    """
    value = metadata.get(key, default)
    if value is None:
        raise KeyError(key)
    kinds = (int,) if kind is int else (int, float)
    if type(value) not in kinds or not 0 < value < 2**31:
        what = "a whole number of at least 1" if kind is int else "a number above 0"
        raise UserError(f"{key} is {str(value)[:40]}; it must be {what}")
    return value


def to_metadata(config: dict) -> dict[str, Any]:
    """The metadata from which llama.cpp builds the model.

    Raises:
        UserError: llama.cpp lacks the architecture, or computes it differently.
    """
    kind = ARCHITECTURES.get(config["model_type"])
    if kind is None or "model_file" in config:
        raise UserError(
            f"GGUF export of {config['model_type']} models is not supported",
            hint=f"supported model types: {', '.join(ARCHITECTURES)}",
            code=FAILED,
        )
    args = model_arguments(config)
    if "sliding_attention" in (getattr(args, "layer_types", None) or []):
        raise _unsupported("sliding-window layers")
    if getattr(args, "rope_traditional", False):
        raise _unsupported("RoPE on adjacent pairs (rope_traditional)")
    head = head_size(config)
    values = {
        "context_length": args.max_position_embeddings,
        "embedding_length": args.hidden_size,
        "feed_forward_length": args.intermediate_size,
        "block_count": args.num_hidden_layers,
        "attention.head_count": args.num_attention_heads,
        "attention.head_count_kv": args.num_key_value_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": args.rms_norm_eps,
        "rope.dimension_count": head,
        "rope.freq_base": args.rope_theta,
        "vocab_size": args.vocab_size,
    }
    rope_type, factor = _rope_scaling(args.rope_scaling)
    if rope_type == "linear":
        values |= {"rope.scaling.type": rope_type, "rope.scaling.factor": factor}
    if missing := [key for key, value in values.items() if value is None]:
        raise UserError(f"the config has no value for {missing[0]}", code=FAILED)
    for key in ("attention.layer_norm_rms_epsilon", "rope.freq_base"):
        values[key] = float(values[key])
    general = {"general.architecture": kind}
    return general | {f"{kind}.{key}": value for key, value in values.items()}


def rope_factors(config: dict) -> np.ndarray | None:
    """Llama 3's frequency factors, float32 [head / 2]; None for other RoPE scaling."""
    args = model_arguments(config)
    rope_type, factor = _rope_scaling(args.rope_scaling)
    if rope_type != "llama3":
        return None
    factors = _llama3_factors(head_size(config), args.rope_theta, factor)
    return factors.astype(np.float32)


def head_size(config: dict) -> int:
    """Dimensions of an attention head."""
    heads = config["num_attention_heads"]
    return config.get("head_dim") or config["hidden_size"] // heads


def _rope_from_metadata(
    metadata: dict[str, Any], kind: str, tensors: dict[str, GGUFTensor], config: dict
) -> dict:
    """The `rope_scaling` of a config, if positions are scaled."""
    scaling = metadata.get(f"{kind}.rope.scaling.type", "none")
    if scaling == "linear":
        factor = _number(metadata, f"{kind}.rope.scaling.factor", float, None)
        return {"rope_scaling": {"type": "linear", "factor": factor}}
    if scaling != "none":
        raise UserError(f"the RoPE scaling {scaling!r} is not supported")
    if ROPE_FREQUENCIES not in tensors:
        return {}
    tensor = tensors[ROPE_FREQUENCIES]
    if tensor.ggml_type != "F32" or tensor.shape != (config["head_dim"] // 2,):
        raise UserError(
            f"{ROPE_FREQUENCIES} is {tensor.ggml_type} {list(tensor.shape)}; it must "
            f"be F32 [{config['head_dim'] // 2}]"
        )
    stored = np.array(blocks.to_dense(tensor).astype(mx.float32))
    for factor in LLAMA3_FACTORS:
        expected = _llama3_factors(config["head_dim"], config["rope_theta"], factor)
        if np.allclose(stored, expected, rtol=1e-4):
            scaling = {"rope_type": "llama3", "factor": factor}
            return {"rope_scaling": scaling | LLAMA3}
    raise UserError(f"{ROPE_FREQUENCIES} holds an unknown RoPE scaling")


def _llama3_factors(head_dim: int, rope_theta: float, factor: float) -> np.ndarray:
    """Divisors of the frequencies: 1 if high, `factor` if low, interpolated between.

    Llama 3.1's rule with its bounds, which are mlx-lm's defaults: 1 and 4 periods
    within 8192 positions.
    """
    steps = np.arange(0, head_dim, 2) / head_dim
    periods = 8192 / (2 * np.pi * rope_theta**steps)
    smooth = np.clip((periods - 1) / 3, 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _rope_scaling(scaling: dict | None) -> tuple[str, float]:
    """Type and factor of the RoPE scaling."""
    scaling = scaling or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    factor = float(scaling.get("factor", 1.0))
    if kind == "llama3":
        bounds = {key: scaling.get(key, v) for key, v in LLAMA3.items()}
        if bounds != LLAMA3 or factor not in LLAMA3_FACTORS:
            raise _unsupported(f"the RoPE scaling {scaling}")
    elif kind not in ("default", "linear"):
        raise _unsupported(f"the RoPE scaling {kind!r}")
    return kind, factor


def _unsupported(what: str) -> UserError:
    return UserError(f"GGUF export of models with {what} is not supported", code=FAILED)
