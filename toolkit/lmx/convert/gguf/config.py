"""The config of a model as GGUF metadata, and back."""

import math
import warnings
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import FAILED, UserError
from ...models.loader import complete_config, model_arguments
from . import blocks, tokenizer
from .architecture import Architecture
from .architectures import BY_MODEL_TYPE, WITH_IMAGES, find_architecture
from .reader import GGUFTensor

# Tensors of RoPE: divisors of all frequencies (Llama 3), and of those in long and short
# contexts (longrope).
ROPE_FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (ROPE_FREQUENCIES, LONG, SHORT)
# RoPE scaling of Llama 3.1 and 3.2, and of EXAONE 4. A file stores only the resulting
# frequency factors.
LLAMA3_FACTORS = (8.0, 16.0, 32.0)
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# YaRN (arXiv 2309.00071): what llama.cpp fixes, which are mlx-lm's defaults.
YARN = {"beta_fast": 32, "beta_slow": 1, "mscale": 1}
# mlx-lm's default.
YARN_CONTEXT = 4096


def from_metadata(metadata: dict[str, Any], tensors: dict[str, GGUFTensor]) -> dict:
    """The config.json of a file's model.

    Raises:
        KeyError: a key is missing.
        UserError: the architecture or its RoPE scaling is not supported, or a value is
            of a wrong type or out of range.
    """
    kind = str(metadata["general.architecture"])[:40]
    architecture = find_architecture(kind, metadata)
    has_experts = bool(metadata.get(f"{kind}.expert_count"))
    if architecture is None or (
        has_experts and "expert_count" not in architecture.keys
    ):
        experts = " with experts" if has_experts else ""
        names = [entry.name for entry in BY_MODEL_TYPE.values()]
        raise UserError(
            f"GGUF files of {kind} models{experts} are not supported",
            hint="supported architectures: " + ", ".join(dict.fromkeys(names)),
        )
    if metadata.get("split.count", 1) not in (0, 1):
        raise UserError(
            "this file is one of several",
            hint="join them with llama-gguf-split --merge",
        )

    def value(name: str, default: int | None = None) -> int:
        return _number(metadata, f"{kind}.{name}", int, default)

    heads, layers = value("attention.head_count"), value("block_count")
    if layers > len(tensors):
        raise UserError(f"the file has {len(tensors):,} tensors for {layers:,} blocks")
    defaults = {"rope.freq_base": 10000.0, "attention.head_count_kv": heads}
    config = {
        "model_type": architecture.model_type,
        "architectures": [architecture.hf_class],
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_scaling": None,
    }
    for name, (key, number) in architecture.keys.items():
        stored = f"{kind}.{name}"
        if name not in architecture.optional or stored in metadata:
            config[key] = _number(metadata, stored, number, defaults.get(name))
    width = config["hidden_size"] // heads
    rotated = value("rope.dimension_count", width)
    if architecture.has_latent_attention:
        config |= {
            "num_key_value_heads": heads,
            "qk_rope_head_dim": rotated,
            "qk_nope_head_dim": value("attention.key_length_mla") - rotated,
            "v_head_dim": value("attention.value_length_mla"),
        }
    else:
        is_partial = architecture.has_partial_rope
        head = value("attention.key_length", width if is_partial else rotated)
        config["head_dim"] = head
        if is_partial:
            config["partial_rotary_factor"] = rotated / head
        elif rotated != head:
            raise UserError(
                f"{kind}.rope.dimension_count is {rotated}; it must be {head}"
            )
    for name, constant in architecture.constants.items():
        if metadata.get(f"{kind}.{name}", constant) != constant:
            raise UserError(f"{kind}.{name} is not {constant}, as mlx-lm assumes")
    for key, name in architecture.switches.items():
        config[key] = f"blk.0.{name}" in tensors
    config |= architecture.fixed(config)
    config |= _rope_from_metadata(metadata, architecture, tensors, config)
    if architecture.has_rope_parameters:
        parameters = config.pop("rope_scaling")
        if not parameters:
            kinds = " or ".join(architecture.rope_scalings)
            raise UserError(f"{architecture.name} models need the RoPE scaling {kinds}")
        moved = [key for key, _ in architecture.keys.values() if "scaling" in key]
        parameters |= {key: config.pop(key) for key in ("rope_theta", *moved)}
        parameters |= {"mscale": 1, "mscale_all_dim": architecture.mscale_all_dim}
        config["rope_parameters"] = parameters | {"type": parameters["rope_type"]}
        config.pop("rope_type", None)
    return config | tokenizer.special_token_ids(metadata)


def _number(
    metadata: dict[str, Any], key: str, kind: type, default: float | None
) -> Any:
    """A number above zero, or a truth value.

    Raises:
        KeyError: the key is missing, and there is no default.
        UserError: the value is another one.
    """
    value = metadata.get(key, default)
    if value is None:
        raise KeyError(key)
    kinds = {int: (int,), bool: (bool,)}.get(kind, (int, float))
    is_in_range = kind is bool or (type(value) in kinds and 0 < value < 2**31)
    if type(value) not in kinds or not is_in_range:
        what = {int: "a whole number of at least 1", bool: "true or false"}.get(
            kind, "a number above 0"
        )
        raise UserError(f"{key} is {str(value)[:40]}; it must be {what}")
    return value


def to_metadata(
    config: dict, architecture: Architecture | None = None
) -> dict[str, Any]:
    """The metadata from which llama.cpp builds the model.

    Args:
        architecture: of a drafter with such layers; None = that of the model type.

    Raises:
        UserError: llama.cpp lacks the architecture, or computes it differently.
    """
    config = text_config(config)
    architecture = architecture or model_architecture(config)
    known = _known_values(config)
    _check_computed_alike(architecture, known)
    head = head_size(config)
    keys = architecture.keys | {"vocab_size": ("vocab_size", int)}
    keys = {
        name: (key, number)
        for name, (key, number) in keys.items()
        if name not in architecture.optional or known.get(key) is not None
    }
    if missing := [name for name, (key, _) in keys.items() if known.get(key) is None]:
        raise UserError(f"the config has no value for {missing[0]}", code=FAILED)
    values = {name: number(known[key]) for name, (key, number) in keys.items()}
    values |= architecture.constants
    if architecture.has_latent_attention:
        # One head, as cached, and those that it stands for.
        latent, rotated = known["kv_lora_rank"], known["qk_rope_head_dim"]
        values |= {
            "attention.head_count_kv": 1,
            "attention.key_length": latent + rotated,
            "attention.value_length": latent,
            "attention.key_length_mla": known["qk_nope_head_dim"] + rotated,
            "attention.value_length_mla": known["v_head_dim"],
            "rope.dimension_count": rotated,
        }
    else:
        is_partial = architecture.has_partial_rope
        rotated = known.get("partial_rotary_factor", 1.0) if is_partial else 1.0
        values |= {
            "attention.key_length": head,
            "attention.value_length": head,
            "rope.dimension_count": int(head * rotated),
        }
    rope_type, factor = _rope_scaling(known.get("rope_scaling"))
    scaling, original = known.get("rope_scaling"), "original_max_position_embeddings"
    if rope_type in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope_type, "rope.scaling.factor": factor}
    if rope_type == "yarn":
        context = scaling.get(original, YARN_CONTEXT)
        values["rope.scaling.original_context_length"] = context
    elif rope_type == "longrope":
        # The context of the unscaled model, and the factor of queries and keys.
        context = known[original]
        ratio = known["max_position_embeddings"] / context
        factor = (
            math.sqrt(1 + math.log(ratio) / math.log(context)) if ratio > 1 else 1.0
        )
        values["rope.scaling.original_context_length"] = context
        values["rope.scaling.attn_factor"] = factor
    elif rope_type == "dynamic":
        scale = scaling["alpha"] ** (head / (head - 2))
        values["rope.freq_base"] = known["rope_theta"] * scale
    prefix = architecture.name
    general = {"general.architecture": prefix}
    return general | {f"{prefix}.{key}": value for key, value in values.items()}


def model_architecture(config: dict) -> Architecture:
    """The architecture of a model, or of the text part of one with images.

    Raises:
        UserError: the export does not support its model type.
    """
    kind = text_config(config)["model_type"]
    if kind not in BY_MODEL_TYPE or "model_file" in config:
        raise UserError(
            f"GGUF export of {kind} models is not supported",
            hint=f"supported model types: {', '.join([*BY_MODEL_TYPE, *WITH_IMAGES])}",
            code=FAILED,
        )
    return BY_MODEL_TYPE[kind]


def text_config(config: dict) -> dict:
    """The config of the text part of a model with images; others are returned."""
    kind = config["model_type"]
    if kind not in WITH_IMAGES:
        return config
    return {"model_type": WITH_IMAGES[kind]} | model_arguments(config).text_config


def _known_values(config: dict) -> dict[str, Any]:
    """The values of a config, with mlx-lm's defaults."""
    with warnings.catch_warnings():
        # Who loads the model says which values are transformers' defaults.
        warnings.simplefilter("ignore")
        config = complete_config(config, place="config.json")
    given = vars(model_arguments(config))
    known = config | {key: value for key, value in given.items() if value is not None}
    # Some models of mlx-lm ignore these keys.
    known |= {key: given.get(key) for key in ("head_dim", "rope_scaling")}
    if "rope_theta" not in given and (parameters := given.get("rope_parameters")):
        known |= parameters | {"rope_scaling": parameters}
    return known


def _check_computed_alike(architecture: Architecture, known: dict[str, Any]) -> None:
    """Refuse what llama.cpp would compute differently.

    Raises:
        UserError: names the key.
    """
    has_windows = "attention.sliding_window" in architecture.keys
    if not has_windows and "sliding_attention" in known.get("layer_types", []):
        raise _unsupported("sliding-window layers")
    adjacent = architecture.rope == "adjacent"
    if known.get("rope_traditional", adjacent) != adjacent:
        pairs = "half a head apart" if adjacent else "adjacent"
        raise _unsupported(f"RoPE on {pairs} pairs (rope_traditional)")
    rope_type, _ = _rope_scaling(known.get("rope_scaling"))
    if rope_type != "default" and rope_type not in architecture.rope_scalings:
        raise _unsupported(f"the RoPE scaling {rope_type!r} in {architecture.name}")
    if rope_type == "yarn":
        scaling, expected = known["rope_scaling"], architecture.mscale_all_dim
        if scaling.get("mscale_all_dim", 0) != expected:
            raise _unsupported(f"mscale_all_dim of YaRN that is not {expected}")
        for key, value in YARN.items():
            if scaling.get(key, value) != value:
                raise _unsupported(f"{key} of YaRN that is not {value}")
    for key, value in architecture.fixed(known).items():
        if known.get(key, value) != value:
            raise _unsupported(
                f"{key}: {known[key]}: llama.cpp computes {architecture.name} models "
                f"of this size with {value}"
            )


def rope_tensors(config: dict) -> dict[str, np.ndarray]:
    """Divisors of RoPE's frequencies, float32 [rotated / 2], by llama.cpp's name."""
    known = _known_values(config)
    rope_type, factor = _rope_scaling(known.get("rope_scaling"))
    if rope_type == "longrope":
        values = known["rope_scaling"]
        factors = {LONG: values["long_factor"], SHORT: values["short_factor"]}
    elif rope_type == "llama3":
        head = head_size(config)
        factors = {ROPE_FREQUENCIES: _llama3_factors(head, known["rope_theta"], factor)}
    else:
        return {}
    return {name: np.array(value, np.float32) for name, value in factors.items()}


def head_size(config: dict) -> int:
    """Dimensions of an attention head."""
    known = _known_values(config)
    return known.get("head_dim") or known["hidden_size"] // known["num_attention_heads"]


def _rope_from_metadata(
    metadata: dict[str, Any],
    architecture: Architecture,
    tensors: dict[str, GGUFTensor],
    config: dict,
) -> dict:
    """The `rope_scaling` of a config, if positions are scaled."""
    kind = architecture.name
    scaling = str(metadata.get(f"{kind}.rope.scaling.type", "none"))[:40]
    known = {"none", *architecture.rope_scalings} & {"none", "linear", "yarn"}
    if scaling not in known:
        raise UserError(f"the RoPE scaling {scaling!r} is not supported in {kind}")
    if scaling == "linear":
        factor = _number(metadata, f"{kind}.rope.scaling.factor", float, None)
        return {"rope_scaling": {"type": "linear", "factor": factor}}
    if scaling == "yarn":
        prefix = f"{kind}.rope.scaling"
        # Queries and keys have YaRN's own factor.
        if (factor := metadata.get(f"{prefix}.attn_factor", 1)) != 1:
            raise UserError(f"{prefix}.attn_factor is {str(factor)[:40]}; it must be 1")
        context = f"{prefix}.original_context_length"
        return {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": _number(metadata, f"{prefix}.factor", float, None),
                "original_max_position_embeddings": _number(
                    metadata, context, int, None
                ),
            }
        }
    names = [name for name in ROPE_TENSORS if name in tensors]
    if not names:
        return {}
    if not {"longrope", "llama3"} & {*architecture.rope_scalings}:
        raise UserError(f"{names[0]} in files of {kind} models is not supported")
    rotated = int(config["head_dim"] * config.get("partial_rotary_factor", 1))
    factors, count = {}, rotated // 2
    for name in names:
        tensor = tensors[name]
        if tensor.ggml_type != "F32" or tensor.shape != (count,):
            raise UserError(
                f"{name} is {tensor.ggml_type} {list(tensor.shape)}; it must be F32 "
                f"[{count}]"
            )
        factors[name] = np.array(blocks.to_dense(tensor).astype(mx.float32))
    if names == [LONG, SHORT] and "longrope" in architecture.rope_scalings:
        scaling = {"type": "longrope", "long_factor": factors[LONG].tolist()}
        key = f"{kind}.rope.scaling.original_context_length"
        return {
            "rope_scaling": scaling | {"short_factor": factors[SHORT].tolist()},
            "original_max_position_embeddings": _number(metadata, key, int, None),
        }
    if names != [ROPE_FREQUENCIES] or "llama3" not in architecture.rope_scalings:
        raise UserError(f"{names[0]} in files of {kind} models is not supported")
    stored = factors[ROPE_FREQUENCIES]
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
    elif kind not in ("default", "linear", "longrope", "su", "dynamic", "yarn"):
        raise _unsupported(f"the RoPE scaling {kind!r}")
    return "longrope" if kind == "su" else kind, factor


def _unsupported(what: str) -> UserError:
    return UserError(f"GGUF export of models with {what} is not supported", code=FAILED)
