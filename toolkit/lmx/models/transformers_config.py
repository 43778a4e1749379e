"""A config.json as transformers reads it, compared with what mlx-lm reads.

transformers' classes define the format. A key that a file leaves out has the value that
transformers gives it: mlx-lm's own defaults are often those of one published model. A
key that mlx-lm's model does not read is named, unless the keys that it reads imply the
value.
"""

import copy
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import MISSING
from typing import Any

from ..errors import UserError, library_errors
from .rope_parameters import LOCAL, LONG, ORIGINAL, SCALING, rope_type

# The weights decide these: a wrong value does not load.
FROM_WEIGHTS = re.compile(
    r"bias$|^(tie_word_embeddings|head_dim|num_hidden_layers)$|"
    r"^((moe_)?intermediate|hidden|vocab)_size$"
)
# Without a class of transformers, these have no default that can be trusted.
DEFINING = re.compile(r"theta|eps$|epsilon|_base")
# Keys that change no prediction of the text model.
HARMLESS = re.compile(
    r"^_|^is_|^transformers|token_ids?$|token_index$|initializer|_init|dropout|_drop$|"
    r"pdrop$|loss|aux|"
    r"dtype|^(output|return|cache|use_cache|unsloth|quantiz|mtp|mlx)|_version$|"
    r"^(architectures|auto_map|id2label|label2id|problem_type|pretraining_tp|ep_size|"
    r"model_type|model_file|kv_bits|max_window_layers|num_nextn_predict_layers|"
    r"rope_parameters|attn_implementation|task_specific_params|model_max_length)$|"
    r"^(vision|audio|image|video|talker|generation)"
)
# Required by mlx-lm's models; fixed or computed in those of transformers.
COMPUTED: dict[str, Callable[[Any], Any]] = {
    "head_dim": lambda config: config.hidden_size // config.num_attention_heads,
    "rotary_dim": lambda config: int(
        config.head_dim * _value(config, "partial_rotary_factor", 1)
    ),
    "shared_intermediate_size": lambda _: 0,
    **dict.fromkeys(("mlp_bias", "post_norm"), lambda _: False),
    "qk_norm": lambda _: True,
}
# Entries of RoPE that mlx-lm reads; of images are those that start with `mrope`.
ROPE = {"type", "rope_type", "rope_theta", "partial_rotary_factor", ORIGINAL}
SCALED = {
    *("factor", "alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    *("low_freq_factor", "high_freq_factor"),
}
LONG_SCALED = {"short_factor", "long_factor", "short_mscale", "long_mscale", "factor"}

OFF, POSITIONS = (False, [], {}), "max_position_embeddings"
Classes = Callable[[dict], tuple[type, type]]


def complete(config: dict, arguments: type, classes: Classes, place: str) -> dict:
    """The config with the values that transformers gives to keys that are left out.

    Both these keys and keys that mlx-lm ignores are named in a warning.

    Args:
        arguments: mlx-lm's `ModelArgs` of the config.
        classes: mlx-lm's choice of a model's classes by its config.

    Raises:
        UserError: a key is left out whose value nobody knows.
    """
    text = config.get("text_config")
    if "text_config" not in arguments.__dataclass_fields__ or not text:
        return _complete(config, arguments, place)
    try:
        inner = classes(text)[1]
    # Models with a language part of their own name its class in one of these ways.
    except (ValueError, KeyError, AttributeError, ImportError):
        module = vars(sys.modules[arguments.__module__])
        names = {"TextModelArgs", "TextArgs", "TextConfig"} & module.keys()
        if not names:
            return config
        inner = module[names.pop()]
    return config | {"text_config": _complete(text, inner, place)}


def _complete(block: dict, arguments: type, place: str) -> dict:
    fields, reference = arguments.__dataclass_fields__, _transformers_config(block)
    defaults, found = {}, {}
    for name, field in fields.items():
        is_given = name in block or name == "model_type"
        if is_given or field.default_factory is not MISSING:
            continue
        value, is_required = _value(reference, name), field.default is MISSING
        # Neither has a value, or it is RoPE in the other spelling.
        if field.default is None and (value is None or isinstance(value, dict)):
            continue
        is_alias = name in getattr(reference, "attribute_map", ())
        if value is not MISSING and (is_alias or not FROM_WEIGHTS.search(name)):
            is_implied = is_alias or isinstance(value, list) or HARMLESS.search(name)
            (found if is_implied else defaults)[name] = value
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
        text = f"the config leaves these to transformers' defaults: {values}"
        warnings.warn(f"{place}: {text}", stacklevel=2)
    block = block | defaults | found
    if unread := _unread(block, fields, reference):
        text = f"mlx-lm's {block.get('model_type')} does not read {', '.join(unread)}"
        warnings.warn(f"{place}: {text}", stacklevel=2)
    return block


def _unread(block: dict, fields: dict, reference: Any) -> list[str]:
    """Keys that may change predictions, and that mlx-lm's model ignores."""
    own = {k: v for k, v in block.items() if k not in fields and v is not None}
    implied = _transformers_config({k: v for k, v in block.items() if k not in own})
    unread = set() if "rope_parameters" in fields else _unread_scaling(block)
    neutral = {"partial_rotary_factor": 1, LOCAL: block.get("rope_theta")}
    neutral |= {"hidden_act": _value(implied, "hidden_activation")}
    # mlx-lm's Mistral has windows only in the layers that `layer_types` names.
    window, positions = (block.get(k) for k in ("sliding_window", POSITIONS))
    if "layer_types" in fields and not block.get("layer_types") and window:
        unread |= {"sliding_window"} if window < (positions or 0) else set()
    for key, given in own.items():
        is_harmless = HARMLESS.search(key) or FROM_WEIGHTS.search(key)
        # Older files give the types of layers twice.
        is_pattern = key == "layer_types" and block.get("sliding_window_pattern")
        if is_harmless or is_pattern or key.endswith(POSITIONS):
            continue
        # An unknown switch that is off changes nothing.
        usual = _value(implied, key, given if given in OFF else MISSING)
        value = _value(reference, key, given)
        if value not in (neutral.get(key, MISSING), usual):
            unread.add(key)
    return sorted(unread)


def _unread_scaling(block: dict) -> set[str]:
    """Entries that change the frequencies, and that mlx-lm's RoPE ignores."""
    parameters = block.get("rope_parameters") or {}
    blocks = [v for v in parameters.values() if isinstance(v, dict)] or [parameters]
    unread = set()
    for scaling in filter(None, [block.get(SCALING), *blocks]):
        kind = rope_type(scaling)
        known = LONG_SCALED | {"attention_factor"} if kind in LONG else SCALED
        known = ROPE | (set() if kind == "default" else known)
        given = {key for key, value in scaling.items() if value not in (None, True)}
        names = {key for key in given - known if not key.startswith("mrope")}
        unread |= {f"{SCALING}.{name}" for name in names}
    return unread


def _value(reference: Any, key: str, default: Any = MISSING) -> Any:
    """A value of transformers' config, under the earlier names for RoPE."""
    if key in ("rope_theta", "partial_rotary_factor", LOCAL):
        parameters = getattr(reference, "rope_parameters", None) or {}
        if key == LOCAL:
            return parameters.get("sliding_attention", {}).get("rope_theta", default)
        return parameters.get("full_attention", parameters).get(key, default)
    try:
        return getattr(reference, key, default)
    # Some classes refuse to give one value for layers of several kinds.
    except (ValueError, RuntimeError):
        return default


def _transformers_config(block: dict) -> Any:
    """transformers' config of these keys; None if it has no class for them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import logging
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        level = logging.get_verbosity()
        logging.set_verbosity(logging.CRITICAL)
        try:
            # A config class is a program: it raises whatever a program raises.
            with library_errors("transformers rejects the config", place=""):
                return CONFIG_MAPPING[block["model_type"]](**copy.deepcopy(block))
        except UserError:
            return None
        finally:
            logging.set_verbosity(level)
