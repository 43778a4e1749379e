"""Repairs of published checkpoints that mlx-lm would misread, made while loading."""

import copy
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import UserError
from .checkpoint import tensor_files
from .config_check import BITS
from .safetensors_io import read_tensors

# Tables computed from the config, which older programs stored with the weights.
BUFFERS = re.compile(r"(rotary\w*\.inv_freq|\.masked_bias|embeddings\.position_ids)$")
HEAD, EMBEDDING = "lm_head.", "model.embed_tokens."
EMBEDDING_WEIGHT = "embed_tokens.weight"

# mlx-lm's choice of a model's class and arguments class by its config.
ModelClasses = Callable[[dict], tuple[Callable[[Any], nn.Module], type]]


def load_options(path: Path, config: dict, classes: ModelClasses) -> dict[str, Any]:
    """Arguments for mlx-lm's `load_model` of a folder.

    Raises:
        UserError: a file is damaged, or the folder has files of several models.
    """
    files = tensor_files(path)
    head = head_config(config, files, lambda n: mx.load(str(files[n]))[n], str(path))
    return {
        "model_config": copy.deepcopy(config) | head,
        "get_model_classes": _with_fixed_tensors(path, classes),
    }


def head_config(
    config: dict, names: Iterable[str], read: Callable[[str], mx.array], place: str
) -> dict:
    """`tie_word_embeddings`, as the tensors in the files say.

    mlx-lm ties the head of many models whose config does not say so, and drops a stored
    head. Hugging Face's programs store no head where it is tied, and keep one whose
    values differ.
    """
    key, names = "tie_word_embeddings", list(names)
    heads = [name for name in names if name.endswith(f"{HEAD}weight")]
    embeddings = [name for name in names if name.endswith(EMBEDDING_WEIGHT)]
    if not heads or not embeddings:
        return {}
    # The longer names are those of other parts, such as an audio decoder.
    head, embedding = (min(names, key=len) for names in (heads, embeddings))
    text = config.get("text_config") or {}
    if (config | text).get(key):
        if mx.array_equal(read(head), read(embedding)).item():
            return {}
        values = f"{head} has other values than {embedding}"
        warnings.warn(
            f"{place}: {key} is true, but {values}: both are used", stacklevel=2
        )
    return {key: False} | ({"text_config": text | {key: False}} if text else {})


def _with_fixed_tensors(path: Path, classes: ModelClasses) -> ModelClasses:
    """Classes whose models get the fixed tensors of `path` through `sanitize`."""

    def fixed_classes(config: dict) -> tuple[Callable[[Any], nn.Module], type]:
        model_class, arguments_class = classes(config)

        def build(arguments: Any) -> nn.Module:
            model = model_class(arguments)
            original = getattr(model, "sanitize", lambda weights: weights)
            parameters = {name for name, _ in tree_flatten(model.parameters())}

            def sanitize(_: dict[str, mx.array]) -> dict[str, mx.array]:
                # A model is read once; after that the class has its own method again.
                del model.sanitize
                weights = original(_fixed_tensors(path, parameters))
                _check_codes(model, weights, path)
                return weights

            model.sanitize = sanitize
            return model

        return build, arguments_class

    return fixed_classes


def _check_codes(model: nn.Module, weights: dict[str, mx.array], path: Path) -> None:
    """Check the widths of codes and scales, by which mlx-lm divides.

    A group size of zero would end the process within MLX.

    Raises:
        UserError: naming the layer.
    """
    for name, module in model.named_modules():
        scales, codes = (weights.get(f"{name}.{leaf}") for leaf in ("scales", "weight"))
        if scales is None or codes is None or not hasattr(module, "to_quantized"):
            continue
        width = module.weight.shape[-1]
        words, groups = (t.shape[-1] if t.ndim else 0 for t in (codes, scales))
        if not groups or width % groups or words * 32 / width not in BITS:
            raise UserError(
                f"{name} has {words:,} words of codes and {groups:,} groups in a row, "
                f"which do not fit to the width {width:,} of the config",
                place=str(path),
                hint="copy config.json from the model that the weights belong to",
            )


def _fixed_tensors(path: Path, parameters: set[str]) -> dict[str, mx.array]:
    """The tensors of a folder, unread, each from the right file with the right name.

    Args:
        parameters: names of the model's own.
    """
    places = tensor_files(path)
    files = {file: read_tensors(file) for file in dict.fromkeys(places.values())}
    tensors = {
        name: files[file][name]
        for name, file in places.items()
        if name in parameters or not BUFFERS.search(name)
    }
    is_tied = not any(name.endswith(f"{HEAD}weight") for name in parameters)
    for name in [n for n in tensors if is_tied and HEAD in n]:
        prefix, _, leaf = name.rpartition(HEAD)
        embedding = f"{prefix}{EMBEDDING}{leaf}"
        if embedding not in tensors:
            tensors[embedding] = tensors.pop(name)
    return tensors
