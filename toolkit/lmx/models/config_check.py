"""Checks of a config.json before mlx-lm builds a model of it.

mlx-lm trusts a config: it builds ten million layers if the config says so, and divides
by a number of heads that is zero. The types and ranges of the keys that most models
share are checked here; the sizes are compared with the weights in the headers.

Then `complete` compares the config with transformers' classes, which define the format.
A key that a file leaves out has the value that transformers gives it: mlx-lm's own
defaults are often those of one published model. A key that mlx-lm's model does not read
is named, unless the keys that it reads imply the value.
"""

import copy
import inspect
import math
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING
from typing import Any, Union, get_args, get_origin

from ..errors import UserError, library_errors
from .config_differences import ADAPTED, COMPUTED, MISREAD, transformers_value
from .rope_parameters import LOCAL, ORIGINAL, POSITIONS, SCALING

HINT = "copy config.json from the model that the weights belong to"
# Keys that are whole numbers of at least 1 in every model that has them. Some models
# give one number per block.
POSITIVE = (
    *("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("n_embd", "n_layer", "n_layers", "n_head", "n_heads", "d_model", "num_layers"),
)
NOT_NEGATIVE = ("intermediate_size", "moe_intermediate_size", "num_experts")
THETAS = ("rope_theta", "rope_local_base_freq", "rotary_emb_base")
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
KINDS = {
    "quantization": dict,
    "quantization_config": dict,
    "text_config": dict,
    "rope_scaling": dict,
    "rope_parameters": dict,
    "layer_types": list,
    "model_type": str,
    "model_file": str,
    "torch_dtype": str,
    "dtype": str,
    "architectures": list | str,
}
# mlx.core.quantize knows these.
BITS, MODES = (1, 2, 3, 4, 5, 6, 8), ("affine", "mxfp4", "mxfp8", "nvfp4")
MAX_TEXT = 200
LAYERS = re.compile(r"(^|_)(layers?|depth)$")
EXPERTS = re.compile(r"experts?$")
SIZES = re.compile(
    r"(^|_)(size|dim|dims|rank|heads?|embd|model|inner|ff|state|groups?)$|^(num|n)_"
)
# Keys of other things than weights.
NO_SIZES = re.compile(r"window|chunk|position|ctx|context|block|batch|keep|token")
# A word of packed 2-bit codes holds 16 inputs; a head may be split or doubled.
SIZE_MARGIN = 64
# The weights decide these: a wrong value does not load.
FROM_WEIGHTS = re.compile(
    r"bias$|^(tie_word_embeddings|head_dim|num_hidden_layers)$|"
    r"^((moe_)?intermediate|hidden|vocab)_size$"
)
# Checked elsewhere: by the shapes of the weights, and with the layers of RoPE.
ELSEWHERE = re.compile(
    rf"{FROM_WEIGHTS.pattern}|^(num_key_value_heads|{SCALING}|{LOCAL}|moe_layers)$|"
    r"max_position_embeddings$|^num_(local_)?experts(_per_tok)?$"
)
# Without a class of transformers, these have no default that can be trusted.
DEFINING = re.compile(r"theta|eps$|epsilon|_base")
# Keys that change no prediction of the text model.
HARMLESS = re.compile(
    r"^_|^is_|^transformers|token_ids?$|token_index$|initializer|_init|dropout|_drop$|"
    r"pdrop$|loss|aux|dtype|logits_to_keep|jitter|fp32|time_step_[mf]|upcast|"
    r"^(output|return|cache|use_cache|use_mamba|use_associative|unsloth|quantiz|mtp|mlx)|"
    r"^(architectures|auto_map|id2label|label2id|problem_type|pretraining_tp|ep_size|"
    r"model_type|model_file|kv_bits|max_window_layers|num_nextn_predict_layers|max_seq_len|"
    r"rope_parameters|attn_implementation|task_specific_params|model_max_length|n_ctx|"
    r"chunk_size|mamba_chunk_size|global_attn_every_n_layers|interleave_moe_layer_step|mamba_expand|rescale_prenorm_residual)$|_version$|"
    r"^(vision|audio|image|video|talker|generation|summary)"
)
# Entries of RoPE that are read; of images are those that start with `mrope`.
SCALED = {
    *("type", "rope_type", "rope_theta", "partial_rotary_factor", ORIGINAL, "factor"),
    *("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("low_freq_factor", "high_freq_factor", "attention_factor"),
    *("short_factor", "long_factor", "short_mscale", "long_mscale"),
}
# Keys that change nothing in texts that are shorter than their value.
WINDOWS = {"sliding_window", "use_sliding_window", "attention_chunk_size"}
ONLY_SEVERAL = re.compile(r"(top_k|num_experts_per_tok) > 1")
OFF = (False, [], {})
Classes = Callable[[dict], tuple[type, type]]


def check_config(config: dict, place: str) -> None:
    """Check the types and the ranges of the common keys, of the language part too.

    Args:
        place: the file, for messages.

    Raises:
        UserError: names the key and what it must be.
    """
    for key, value in _values(config):
        if value is not None and (fault := _fault(key, value)):
            raise UserError(
                f"{key} is {_shown(value)}; it must be {fault}", place=place, hint=HINT
            )
    for _, block in _blocks(config):
        layers, kinds = block.get("num_hidden_layers"), block.get("layer_types")
        if type(layers) is int and kinds is not None and len(kinds) < layers:
            raise UserError(
                f"layer_types has {len(kinds)} entries for {layers:,} layers",
                place=place,
                hint=HINT,
            )
    block = config.get("quantization")
    if block is None:
        return
    # mlx-lm's block has one grid, and grids or `false` by layer, which may leave out
    # what is like the rest.
    common = {k: block[k] for k in ("bits", "group_size", "mode") if k in block}
    grids = {"quantization": block}
    for path, layer in block.items():
        if isinstance(layer, dict):
            grids[f"quantization.{path}"] = common | layer
    for name, grid in grids.items():
        bits, size = grid.get("bits"), grid.get("group_size")
        mode = grid.get("mode", "affine")
        if type(bits) is not int or bits not in BITS:
            fault = f"bits is {_shown(bits)}; it must be one of {BITS}"
        elif type(size) is not int or not 0 < size < 2**20:
            fault = f"group_size is {_shown(size)}; it must be a number such as 64"
        elif mode not in MODES:
            fault = f"mode is {_shown(mode)}; it must be one of {', '.join(MODES)}"
        else:
            continue
        raise UserError(f"{name}.{fault}", place=place, hint=HINT)


def check_arguments(config: dict, arguments: type, place: str) -> None:
    """Check the values that an architecture of mlx-lm reads against its declared types.

    Only numbers, texts and switches: mlx-lm declares the others loosely. None stands
    for a default that mlx-lm's own code may handle.

    Args:
        arguments: the dataclass `ModelArgs` of the architecture.

    Raises:
        UserError: names the key.
    """
    for key, field in getattr(arguments, "__dataclass_fields__", {}).items():
        is_union = get_origin(field.type) in (Union, types.UnionType)
        kinds = set(get_args(field.type)) if is_union else {field.type}
        kinds.discard(type(None))
        value = config.get(key)
        is_simple = kinds and kinds <= {int, float, bool, str}
        if not is_simple or value is None or key.endswith("token_id"):
            continue
        # What is declared as one of int, float and bool is published as any of them.
        kinds |= {int, float} if kinds & {int, float, bool} else set()
        if isinstance(value, tuple(kinds)):
            continue
        names = " or ".join(sorted(kind.__name__ for kind in kinds))
        raise UserError(
            f"{key} is {_shown(value)}; this architecture reads {names}",
            place=place,
            hint=HINT,
        )


def check_sizes(
    config: dict, shapes: Mapping[str, tuple[int, ...]], place: str
) -> None:
    """Refuse numbers of layers, experts and sizes that the weights cannot have.

    Building the model would take minutes or all memory. This takes microseconds.

    Args:
        shapes: of all tensors, by name, from the headers of the weight files.

    Raises:
        UserError: names the key and the size in the weight files.
    """
    largest = max((max(shape, default=1) for shape in shapes.values()), default=0)
    for path, value in _values(config):
        key = path.rpartition(".")[2]
        if type(value) is not int or NO_SIZES.search(key):
            continue
        if LAYERS.search(key):
            limit, what = len(shapes), f"the weight files have {len(shapes):,} tensors"
        elif EXPERTS.search(key):
            limit = max(len(shapes), largest)
            what = f"no tensor of the weight files has more than {largest:,} rows"
        elif SIZES.search(key):
            limit = SIZE_MARGIN * largest
            what = f"no tensor of the weight files has more than {largest:,} rows"
        else:
            continue
        if value > limit:
            raise UserError(f"{path} is {value:,}, but {what}", place=place, hint=HINT)


def _blocks(config: dict) -> Iterator[tuple[str, dict]]:
    """The config and its language part, with the start of their keys."""
    yield "", config
    if isinstance(config.get("text_config"), dict):
        yield "text_config.", config["text_config"]


def _values(config: dict) -> Iterator[tuple[str, Any]]:
    for start, block in _blocks(config):
        for key, value in block.items():
            yield f"{start}{key}", value


def _fault(path: str, value: Any) -> str | None:
    """What the value of a key must be; None if it is that."""
    key = path.rpartition(".")[2]
    if key in KINDS and not isinstance(value, KINDS[key]):
        names = {dict: "an object", list: "a list", str: "text"}
        return names.get(KINDS[key], "a list of texts")
    if isinstance(value, str) and key in KINDS and len(value) > MAX_TEXT:
        return f"text of at most {MAX_TEXT} characters"
    if key in ("layer_types", "architectures"):
        texts = [value] if isinstance(value, str) else value
        return None if all(isinstance(v, str) for v in texts) else "a list of texts"
    if key in POSITIVE and not _are_integers(value, 1):
        return "a whole number of at least 1"
    if key in NOT_NEGATIVE and not _are_integers(value, 0):
        return "a whole number of at least 0"
    if key in EPSILONS and not (_is_number(value) and value >= 0):
        return "a number of at least 0"
    if key in THETAS and not isinstance(value, list):
        return None if _is_number(value) and value > 0 else "a number above 0"
    if key == "partial_rotary_factor" and not isinstance(value, list):
        return None if _is_number(value) and 0 < value <= 1 else "above 0, at most 1"
    return None


def _are_integers(value: Any, least: int) -> bool:
    """Whether a value, or all of a list of them, are numbers of at least `least`."""
    values = value if isinstance(value, list) else [value]
    return bool(values) and all(
        # Null: this block has no such part.
        v is None or (type(v) is int and least <= v < 2**31)
        for v in values
    )


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # A whole number of hundreds of digits has no float.
    return is_number and abs(value) < 1e300 and math.isfinite(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def complete(config: dict, arguments: type, classes: Classes, place: str) -> dict:
    """The config with the values that transformers gives to keys that are left out.

    These keys, and keys that mlx-lm ignores and transformers does not know, are named
    in a warning.

    Args:
        arguments: mlx-lm's `ModelArgs` of the config.
        classes: mlx-lm's choice of a model's classes by its config.

    Raises:
        UserError: a key is left out whose value nobody knows, or mlx-lm ignores a key
            that transformers reads.
    """
    text = config.get("text_config")
    if "text_config" not in arguments.__dataclass_fields__ or not text:
        return _complete(config, arguments, place)
    # Models with a language part of their own name its class in one of these ways.
    modules = [vars(module) for module in _modules(arguments)]
    names = ("TextModelArgs", "TextArgs", "TextConfig")
    inner = next((m[name] for m in modules for name in names if name in m), None)
    try:
        inner = inner or classes(text)[1]
    except (ValueError, KeyError, AttributeError, ImportError):
        return config
    return config | {"text_config": _complete(text, inner, place)}


def _complete(block: dict, arguments: type, place: str) -> dict:
    fields, reference = arguments.__dataclass_fields__, _transformers_config(block)
    adapt = ADAPTED.get(block.get("model_type")) if reference else None
    adapted = adapt(block, reference) if adapt else {}
    given, block = block, block | adapted
    defaults, found = {}, {}
    # Some of mlx-lm's models read this spelling only.
    if "rope_parameters" in fields and not block.get("rope_parameters"):
        parameters = getattr(reference, "rope_parameters", None)
        found = {"rope_parameters": parameters} if parameters else {}
    for name, field in fields.items():
        is_given = name in block or name == "model_type"
        if is_given or field.default_factory is not MISSING:
            continue
        value, is_required = (
            transformers_value(reference, name),
            field.default is MISSING,
        )
        # Neither has a value, or it is RoPE in the other spelling.
        if field.default is None and (value is None or isinstance(value, dict)):
            continue
        is_alias = name in getattr(reference, "attribute_map", ())
        if value is not MISSING and (is_alias or not FROM_WEIGHTS.search(name)):
            is_implied = is_alias or isinstance(value, list) or HARMLESS.search(name)
            (found if is_implied else defaults)[name] = value
        elif reference and name in COMPUTED and (is_required or name == "head_dim"):
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
    _check_unread(given, arguments, reference, adapted, place)
    return block


def _check_unread(
    block: dict, arguments: type, reference: Any, adapted: dict, place: str
) -> None:
    """Refuse keys that only transformers reads, and warn of those that neither does.

    Args:
        adapted: values that mlx-lm reads in place of keys of this block.
    """
    fields = arguments.__dataclass_fields__
    # A key that mlx-lm declares may not occur again in its code.
    source = "".join(map(inspect.getsource, _modules(arguments)))
    read = fields.keys() & set(re.findall(r"""[."'](\w+)""", source))
    read |= {"rope_theta", LOCAL} if "rope_parameters" in read else set()
    read |= {"partial_rotary_factor"} if "rotary_dim" in read else set()
    aliases = getattr(reference, "attribute_map", {}).items()
    read |= {name for names in aliases if read & set(names) for name in names}
    # The adapted values come from these.
    read |= {"layer_types", "per_layer_config"} if adapted else set()
    misread = MISREAD.get(arguments.__module__.rpartition(".")[2], {})
    read |= misread.keys()
    rest = {k: v for k, v in block.items() if k in read or k == "model_type"}
    implied = _transformers_config(rest)
    unread = {k for k, v in misread.items() if transformers_value(reference, k, v) != v}
    if "rope_parameters" not in read:
        scaling = {k: v for k, v in (block.get(SCALING) or {}).items() if v is not None}
        names = (k for k in scaling.keys() - SCALED if k[:5] != "mrope")
        unread |= {f"{SCALING}.{name}" for name in names}
    own = {k: v for k, v in block.items() if k not in read and v is not None}
    neutral = {"partial_rotary_factor": 1}
    neutral |= {"hidden_act": transformers_value(implied, "hidden_activation")}
    # mlx-lm's Mistral has windows only in the layers that `layer_types` names, which
    # transformers fills in for other families.
    window, positions = (block.get(k) for k in ("sliding_window", POSITIONS))
    layer_types = transformers_value(reference, "layer_types", None)
    if "layer_types" in read and not layer_types and window:
        unread |= {"sliding_window"} if window < (positions or 0) else set()
    if LOCAL in own:
        unread |= {LOCAL} if own[LOCAL] != block.get("rope_theta") else set()
    # Keys that may change predictions, and that mlx-lm's model ignores.
    for key, given in own.items():
        # A switch is no length.
        is_window = key in WINDOWS and given is not True
        is_long = is_window and given >= (positions or given)
        if is_long or HARMLESS.search(key) or ELSEWHERE.search(key):
            continue
        # An unknown switch that is off changes nothing.
        usual = transformers_value(implied, key, given if given in OFF else MISSING)
        value = transformers_value(reference, key, given)
        if value not in (neutral.get(key, MISSING), usual):
            unread.add(key)
    # Some weights of experts are normalized only if there are several.
    is_normalized = block.get("norm_topk_prob", True) and ONLY_SEVERAL.search(source)
    if is_normalized and block.get("num_experts_per_tok") == 1:
        unread.add("num_experts_per_tok")
    text = f"mlx-lm's {block.get('model_type')} does not read"
    known = getattr(implied, "__dataclass_fields__", {}).keys() - WINDOWS
    known |= {LOCAL, "rope_theta"} if "rope_parameters" in known else set()
    known |= misread.keys()
    if wrong := sorted(known & unread):
        raise UserError(
            f"{text} {', '.join(wrong)}, and would compute something else",
            place=place,
            hint="transformers reads it; lmx cannot load this model",
        )
    if unread:
        warnings.warn(f"{place}: {text} {', '.join(sorted(unread))}", stacklevel=2)


def _modules(arguments: type) -> list[types.ModuleType]:
    """mlx-lm's modules of a model: that of its arguments, and those that it uses."""
    module = sys.modules[arguments.__module__]
    used = {inspect.getmodule(value) for value in vars(module).values()} - {
        module,
        None,
    }
    return [module, *(m for m in used if m.__name__.startswith("mlx_lm."))]


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
