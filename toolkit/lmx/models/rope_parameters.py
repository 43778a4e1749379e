"""Settings of RoPE in a config.json, under the names of both spellings.

transformers 5 writes all of them into `rope_parameters`, by type of layer if they
differ. mlx-lm's models read `rope_theta`, `rope_scaling`, `partial_rotary_factor` and
`rope_local_base_freq`, as earlier files have them.

LongRoPE (arXiv 2402.13753) has other frequencies in short sequences than in long ones.
The keys of a sequence that grows beyond the original length would have to be computed
again. lmx computes with the factors of short sequences, and refuses longer ones. mlx-lm
takes the factors of long sequences for all.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError

SCALING, LOCAL = "rope_scaling", "rope_local_base_freq"
POSITIONS, ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
# mlx-lm's names in architectures that have others.
NAMES = {
    "gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
}
LONG = ("longrope", "su")
# Their formulas need the original length, for which mlx-lm has a default.
EXTENDED = (*LONG, "llama3", "yarn")
# Types with one formula, which every plain layer of RoPE can have.
REPLACED = ("linear", "dynamic", "llama3", "yarn")


def in_both_spellings(config: dict, place: str) -> dict:
    """The config with the values of `rope_parameters` under the earlier names too.

    Raises:
        UserError: both spellings have a value, and the values differ; or the original
            length of a scaled context is missing.
    """
    config = _completed(config, place)
    if isinstance(text := config.get("text_config"), dict):
        config["text_config"] = _completed(text, place)
    return config


def rope_type(scaling: dict) -> str:
    """The type of RoPE that `rope_scaling` or `rope_parameters` names."""
    return scaling.get("rope_type") or scaling.get("type") or "default"


def _completed(block: dict, place: str) -> dict:
    parameters = block.get("rope_parameters")
    parameters = parameters if isinstance(parameters, dict) else {}
    for scaling in (block.get(SCALING), parameters, *parameters.values()):
        if not isinstance(scaling, dict):
            continue
        if not isinstance(rope_type(scaling), str):
            raise UserError("the type of RoPE must be text", place=place)
        is_typed = scaling.get("rope_type") or scaling.get("type")
        factors = [
            k for k, v in scaling.items() if "factor" in k and v not in (None, 1)
        ]
        factors = [key for key in factors if key != "partial_rotary_factor"]
        if factors and not is_typed:
            raise UserError(
                f"RoPE has {factors[0]}, but no rope_type, so it would be ignored",
                place=place,
                hint="add rope_type from the model's authors",
            )
    found: dict[str, Any] = {}
    if parameters:
        by_layer = {k: v for k, v in parameters.items() if isinstance(v, dict)}
        main = by_layer.get("full_attention", {}) if by_layer else parameters
        local = by_layer.get("sliding_attention", {})
        names, kind = NAMES.get(str(block.get("model_type")), {}), rope_type(main)
        for key in ("rope_theta", "partial_rotary_factor"):
            found |= {names.get(key, key): main[key]} if key in main else {}
        typed = main | {"type": kind, "rope_type": kind}
        found[SCALING] = typed if kind != "default" else None
        if kind in LONG and ORIGINAL in main:
            found[ORIGINAL] = main[ORIGINAL]
        if "rope_theta" in local:
            found[LOCAL] = local["rope_theta"]
    for key, value in found.items():
        # The config may give the value in the earlier spelling too.
        given = block.get(key)
        is_neutral = isinstance(given, dict) and rope_type(given) == "default"
        if given is not None and not is_neutral and given != value:
            is_same = isinstance(given, dict) and isinstance(value, dict)
            if is_same:
                kind = rope_type(given)
                given = given | {"type": kind, "rope_type": kind}
                is_same = all(given[n] == value[n] for n in given.keys() & value.keys())
            if not is_same:
                raise UserError(
                    f"{key} is {str(given)[:60]}, but rope_parameters says "
                    f"{str(value)[:60]}",
                    place=place,
                    hint="remove the one that the model was not trained with",
                )
            value = value | given
        block = block | {key: value}
    scaling = block.get(SCALING)
    kind = rope_type(scaling) if isinstance(scaling, dict) else None
    if kind in EXTENDED and scaling.get(ORIGINAL) is block.get(ORIGINAL) is None:
        raise UserError(
            f"{SCALING} of the type {kind} has no {ORIGINAL}",
            place=place,
            hint=f"add {ORIGINAL} from the model's authors: it changes all predictions",
        )
    return block


def use_scaling(model: nn.Module, config: dict, make: Callable[..., nn.Module]) -> None:
    """Give a model the scaling of its config where mlx-lm reads it in part or not.

    Args:
        make: mlx-lm's `initialize_rope`.

    Raises:
        UserError: mlx-lm's model has no layers that can be replaced.
    """
    text = config | (config.get("text_config") or {})
    scaling, parameters = text.get(SCALING) or {}, text.get("rope_parameters") or {}
    kind, family = rope_type(scaling), text["model_type"]
    if kind not in REPLACED:
        return
    ropes = [
        (parent, name, rope)
        for parent in model.modules()
        for name, rope in parent.items()
        if re.search("rope|rotary", type(rope).__name__, re.I)
    ]
    names = {type(rope).__name__ for *_, rope in ropes}
    are_plain = names == {"RoPE"} and all(rope.scale == 1 for *_, rope in ropes)
    is_linear = kind == "linear" and "RoPE" in names and not are_plain
    if not is_linear and not any(kind in name.lower() for name in names):
        if not are_plain or any(isinstance(v, dict) for v in parameters.values()):
            raise UserError(f"mlx-lm's {family} does not read {SCALING} of type {kind}")
        for parent, name, rope in ropes:
            sizes = rope.dims, rope.base, rope.traditional
            parent[name] = make(*sizes, scaling, text.get(POSITIONS))
    theta = NAMES.get(family, {}).get("rope_theta", "rope_theta")
    for parent, name, _ in ropes:
        if kind == "yarn" and hasattr(parent[name], "mscale"):
            _complete_yarn(parent[name], scaling, text[theta])


def _complete_yarn(rope: nn.Module, scaling: dict, base: float) -> None:
    """Apply `attention_factor` and `truncate`, as transformers does."""
    factor, size = scaling["factor"], 2 * rope._freqs.size
    scales = [scaling.get(key) for key in ("mscale", "mscale_all_dim")]
    scales = scales if all(scales) else [1, 0]
    first, second = (0.1 * s * math.log(max(factor, 1)) + 1 for s in scales)
    rope.mscale = scaling.get("attention_factor") or first / second
    if scaling.get("truncate", True):
        return

    def dimension(rotations: float) -> float:
        ratio = scaling[ORIGINAL] / (rotations * 2 * math.pi)
        return size * math.log(ratio) / (2 * math.log(base))

    low = max(dimension(scaling.get("beta_fast") or 32), 0)
    high = min(dimension(scaling.get("beta_slow") or 1), size - 1)
    ramp = mx.clip((mx.arange(size // 2) - low) / (high - low), 0, 1)
    steps = base ** (mx.arange(0, size, 2, dtype=mx.float32) / size)
    rope._freqs = steps / (ramp / factor + 1 - ramp)


def check_length(config: dict, tokens: int) -> None:
    """Refuse a sequence that needs the factors of long ones.

    Raises:
        UserError: naming the original length of the model.
    """
    config = config | (config.get("text_config") or {})
    scaling = config.get(SCALING) or {}
    original = config.get(ORIGINAL) or scaling.get(ORIGINAL)
    if rope_type(scaling) in LONG and tokens > original:
        raise UserError(
            f"a sequence of {tokens:,} tokens needs this model's factors of long "
            f"sequences; lmx computes up to {original:,}",
            hint="shorten the text, or lower max_seq_length",
        )


def use_short_factors(model: nn.Module, config: dict, kind: type[nn.Module]) -> None:
    """Change mlx-lm's layers of LongRoPE, and limit the model's positions.

    Args:
        kind: mlx-lm's class of these layers.
    """

    class ShortRoPE(kind):
        def __call__(self, x, offset=0):
            if isinstance(offset, int):
                check_length(config, offset + x.shape[-2])
            return super().__call__(x, offset)

    config = config | (config.get("text_config") or {})
    scaling = config.get(SCALING) or {}
    for rope in [module for module in model.modules() if type(module) is kind]:
        positions = rope.original_max_position_embeddings
        steps = mx.arange(0, rope.dim, 2, dtype=mx.float32) / rope.dim
        factors = mx.array(scaling.get("short_factor", 1.0), dtype=mx.float32)
        rope._freqs = factors * config["rope_theta"] ** steps
        ratio = scaling.get("factor") or config["max_position_embeddings"] / positions
        # As transformers computes it.
        default = math.sqrt(1 + math.log(max(ratio, 1)) / math.log(positions))
        given = (scaling.get(key) for key in ("short_mscale", "attention_factor"))
        rope._scale = next((value for value in given if value is not None), default)
        rope.__class__ = ShortRoPE
        model.args.max_position_embeddings = positions
