"""What mlx-lm's models read otherwise than the classes of transformers, by family."""

from collections.abc import Callable
from dataclasses import MISSING
from typing import Any

from .rope_parameters import LOCAL, ORIGINAL, POSITIONS, SCALING


def transformers_value(reference: Any, key: str, default: Any = MISSING) -> Any:
    """A value of transformers' config, under the earlier names for RoPE."""
    if key in ("rope_theta", "rope_type", "partial_rotary_factor", LOCAL):
        parameters = getattr(reference, "rope_parameters", None) or {}
        if key == LOCAL:
            return parameters.get("sliding_attention", {}).get("rope_theta", default)
        return parameters.get("full_attention", parameters).get(key, default)
    try:
        return getattr(reference, key, default)
    # Some classes refuse to give one value for layers of several kinds.
    except (ValueError, RuntimeError):
        return default


# Required by mlx-lm's models; fixed or computed in those of transformers.
COMPUTED: dict[str, Callable[[Any], Any]] = {
    "head_dim": lambda config: config.hidden_size // config.num_attention_heads,
    "rotary_dim": lambda config: int(
        config.head_dim * transformers_value(config, "partial_rotary_factor", 1)
    ),
    "shared_intermediate_size": lambda _: 0,
    **dict.fromkeys(("mlp_bias", "post_norm"), lambda _: False),
    "qk_norm": lambda _: True,
    "n_ctx": lambda config: config.n_positions,
    "block_dim": lambda config: config.hidden_size,
}


def _neutral_scaling(block: dict, _: Any) -> dict:
    """mlx-lm's code needs a scaling; this one changes nothing."""
    if block.get(SCALING):
        return {}
    return {SCALING: {"type": "default", "factor": 1.0, ORIGINAL: block[POSITIONS]}}


def _interval(key: str) -> Callable[[dict, Any], dict]:
    """`key` is the number of layers from one with full attention to the next."""

    def read(_: dict, reference: Any) -> dict:
        is_full = [kind == "full_attention" for kind in reference.layer_types]
        period = [*is_full, True].index(True) + 1
        is_regular = is_full == [n % period == 0 for n in range(1, len(is_full) + 1)]
        return {key: period} if is_regular else {}

    return read


def _letters(_: dict, reference: Any) -> dict:
    """EXAONE's shortest pattern of layers; none stands for full attention in all."""
    kinds = ["L" if k == "sliding_attention" else "G" for k in reference.layer_types]
    count, pattern = len(kinds), "".join(kinds)
    if set(kinds) == {"L"}:
        return {}
    sizes = [n for n in range(1, count + 1) if (pattern[:n] * count)[:count] == pattern]
    return {"sliding_window_pattern": pattern[: sizes[0]] if "L" in kinds else None}


def _global_layers(block: dict, _: Any) -> dict:
    """The sizes of Gemma 4's layers with full attention."""
    names = {"head_dim": "global_head_dim"}
    names["num_key_value_heads"] = "num_global_key_value_heads"
    layers = (block.get("per_layer_config") or {}).values()
    return {names[k]: v for layer in layers for k, v in layer.items() if k in names}


# Values that mlx-lm's code reads otherwise than transformers, by `model_type`.
ADAPTED: dict[str | None, Callable[[dict, Any], dict]] = {
    **dict.fromkeys(("deepseek_v2", "minicpm3"), _neutral_scaling),
    **dict.fromkeys(("cohere2", "gemma3_text"), _interval("sliding_window_pattern")),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        _interval("full_attention_interval"),
    ),
    "gpt_bigcode": lambda _, config: {"n_inner": config.n_inner or 4 * config.n_embd},
    "exaone4": _letters,
    "gemma4_text": _global_layers,
    "mamba2": lambda _, config: {
        "intermediate_size": config.expand * config.hidden_size
    },
    "granitemoehybrid": lambda block, config: {
        "layer_types": [
            "mamba" if kind in ("mamba", "linear_attention") else "attention"
            for kind in config.layer_types
        ],
        "position_embedding_type": block.get("position_embedding_type") or "nope",
    },
}
# The values of keys for which the code of a module of mlx-lm is written.
MISREAD: dict[str, dict[str, Any]] = {
    "gpt_bigcode": {"multi_query": True},
    "llama4": {"rms_norm_eps": 1e-5},
    "llama4_text": {"rope_type": "default"},
    "mamba2": {"layer_norm_epsilon": 1e-5},
    "phimoe": {"num_experts_per_tok": 2},
    "recurrent_gemma": {"rms_norm_eps": 1e-6, "partial_rotary_factor": 0.5},
}
