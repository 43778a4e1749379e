"""A config.json as transformers reads it, compared with what mlx-lm reads.

transformers' classes define the format. A key that a file leaves out has the value that
transformers gives it: mlx-lm's own defaults are often those of one published model. A
key that mlx-lm's model does not read changes nothing there: it is named, unless the
keys that are read imply its value.
"""

import copy
import dataclasses
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

from ..errors import UserError
from .rope_parameters import LOCAL, ORIGINAL, SCALING, rope_type

MISSING = object()
UNSET = dataclasses.MISSING
# The weights decide these: a wrong value does not load.
FROM_WEIGHTS = re.compile(
    r"bias$|^(tie_word_embeddings|head_dim|num_hidden_layers)$|"
    r"^((moe_)?intermediate|hidden|vocab)_size$"
)
# Without a class of transformers, these have no default that can be trusted.
DEFINING = re.compile(r"theta|eps$|epsilon|_base")
# Keys that change no prediction of the text model.
HARMLESS = re.compile(
    r"^_|token_ids?$|token_index$|initializer|_init|dropout|_drop$|pdrop$|loss|aux|"
    r"dtype|^(output|return|cache|use_cache|unsloth|quantiz|mtp|mlx)|_version$|"
    r"^(architectures|auto_map|id2label|label2id|problem_type|pretraining_tp|ep_size|"
    r"model_type|model_file|kv_bits|max_window_layers|num_nextn_predict_layers|"
    r"rope_parameters|attn_implementation)$|"
    r"^(vision|audio|image|video|talker|generation)"
)
# Required by mlx-lm's models; fixed or computed in those of transformers.
COMPUTED: dict[str, Callable[[Any], Any]] = {
    "block_dim": lambda config: config.hidden_size,
    "head_dim": lambda config: config.hidden_size // config.num_attention_heads,
    "mlp_bias": lambda _: False,
    "n_ctx": lambda config: config.n_positions,
    "post_norm": lambda _: False,
    "qk_norm": lambda _: True,
    "rotary_dim": lambda config: int(
        config.head_dim * _value(config, "partial_rotary_factor", 1)
    ),
    "shared_intermediate_size": lambda _: 0,
}
# What mlx-lm reads of `rope_scaling`, by type; `mrope_...` is of images.
YARN = "factor beta_fast beta_slow mscale mscale_all_dim"
SCALING_KEYS = {
    "default": "",
    "linear": "factor",
    "dynamic": f"alpha {YARN}",
    "llama3": "factor low_freq_factor high_freq_factor",
    "yarn": YARN,
    "longrope": "factor attention_factor short_factor long_factor short_mscale",
}
COMMON = f"type rope_type rope_theta partial_rotary_factor {ORIGINAL} long_mscale"

Classes = Callable[[dict], tuple[type, type]]


def complete(config: dict, arguments: type, classes: Classes, place: str) -> dict:
    """The config with the values that transformers gives to keys that are left out.

    Both these keys and keys that mlx-lm ignores are named in a warning.

    Args:
        arguments: mlx-lm's `ModelArgs` of the config.
        classes: mlx-lm's choice of a model's classes by its config.

    Raises:
        UserError: a key is left out whose value nobody knows, or mlx-lm would compute
            another function than the config describes.
    """
    text = config.get("text_config")
    if "text_config" not in arguments.__dataclass_fields__ or not text:
        return _complete(config, arguments, place)
    inner = _text_arguments(arguments, text, classes)
    return config | {"text_config": _complete(text, inner, place)} if inner else config


def _text_arguments(arguments: type, text: dict, classes: Classes) -> type | None:
    """The arguments class of the language part of a model with images."""
    try:
        return classes(text)[1]
    except (ValueError, KeyError, AttributeError, ImportError):
        module = sys.modules[arguments.__module__]
        names = ("TextModelArgs", "TextArgs", "TextConfig")
        return next(
            (vars(module)[name] for name in names if name in vars(module)), None
        )


def _complete(block: dict, arguments: type, place: str) -> dict:
    fields = arguments.__dataclass_fields__
    reference = _transformers_config(block)
    defaults, found = {}, {}
    for name, field in fields.items():
        is_optional = field.default is None or field.default_factory is not UNSET
        if name in block or name == "model_type" or is_optional:
            continue
        value, is_required = _value(reference, name), field.default is UNSET
        is_alias = name in getattr(reference, "attribute_map", ())
        is_checked = bool(FROM_WEIGHTS.search(name))
        if value is not MISSING and (is_alias or not is_checked):
            is_silent = is_alias or HARMLESS.search(name)
            (found if is_silent else defaults)[name] = value
        elif is_required and reference and name in COMPUTED:
            found[name] = COMPUTED[name](reference)
        elif reference is None and DEFINING.search(name) and not is_required:
            raise UserError(
                f"the config has no {name}, and transformers has no default for it",
                place=place,
                hint=f"add {name}; mlx-lm would take {field.default}",
            )
    if defaults:
        values = ", ".join(f"{name} {value}" for name, value in defaults.items())
        warnings.warn(
            f"{place}: the config leaves these to transformers' defaults: {values}",
            stacklevel=2,
        )
    block = block | defaults | found
    if unread := _unread(block, fields, reference):
        warnings.warn(
            f"{place}: mlx-lm's {block.get('model_type')} does not read "
            f"{', '.join(sorted(unread))}",
            stacklevel=2,
        )
    return block


def _unread(block: dict, fields: dict, reference: Any) -> list[str]:
    """Keys that may change predictions, and that mlx-lm's model ignores."""
    own = [
        key for key, value in block.items() if key not in fields and value is not None
    ]
    implied = _transformers_config({k: v for k, v in block.items() if k not in own})
    unread = []
    for key in own:
        value = _value(reference, key, block[key])
        is_neutral = key == "partial_rotary_factor" and value == 1
        is_neutral |= key.endswith("max_position_embeddings")
        is_global = key == LOCAL and value == block.get("rope_theta")
        is_pattern = key == "layer_types" and value == _pattern(block)
        is_harmless = HARMLESS.search(key) or FROM_WEIGHTS.search(key)
        if not (is_harmless or is_neutral or is_global or is_pattern):
            unread += [key] if _value(implied, key) != value else []
    if "rope_parameters" not in fields:
        unread += _unread_scaling(block)
    return unread


def _unread_scaling(block: dict) -> list[str]:
    """Entries that change the frequencies, and that mlx-lm's RoPE ignores."""
    parameters = block.get("rope_parameters") or {}
    blocks = [v for v in parameters.values() if isinstance(v, dict)] or [parameters]
    unread = set()
    for scaling in [block.get(SCALING), *blocks]:
        known = SCALING_KEYS.get(rope_type(scaling or {}))
        for key, value in (scaling or {}).items() if known is not None else ():
            is_known = key in f"{known} {COMMON}".split() or key.startswith("mrope")
            if (
                not is_known
                and value is not None
                and (key, value) != ("truncate", True)
            ):
                unread.add(f"{SCALING}.{key}")
    return sorted(unread)


def _pattern(block: dict) -> list[str]:
    """Types of layers by EXAONE's pattern of L and G, local and global."""
    pattern = block.get("sliding_window_pattern")
    if not isinstance(pattern, str) or not pattern:
        return []
    layers = {"L": "sliding_attention", "G": "full_attention"}
    count = block.get("num_hidden_layers") or 0
    return [layers.get(pattern[i % len(pattern)], "") for i in range(count)]


def _value(reference: Any, key: str, default: Any = MISSING) -> Any:
    """A value of transformers' config, under the earlier names for RoPE."""
    if key in ("rope_theta", "partial_rotary_factor", LOCAL):
        parameters = getattr(reference, "rope_parameters", None) or {}
        layers = "sliding_attention" if key == LOCAL else "full_attention"
        parameters = parameters.get(layers, {} if key == LOCAL else parameters)
        return parameters.get("rope_theta" if key == LOCAL else key, default)
    try:
        return getattr(reference, key, default)
    # Some classes refuse to give one value for layers of several kinds.
    except (ValueError, RuntimeError):
        return default


def _transformers_config(block: dict) -> Any:
    """transformers' config of these keys; None if it has no class for them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        level = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity(transformers.logging.CRITICAL)
        try:
            return CONFIG_MAPPING[block["model_type"]](**copy.deepcopy(block))
        # A config class is a program: it raises whatever a program raises.
        except Exception:
            return None
        finally:
            transformers.logging.set_verbosity(level)
