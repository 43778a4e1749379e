"""What published checkpoints hold that mlx-lm takes amiss, put right on the way in."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .checkpoint import read_config, tensor_files

# Tables computed from the config, which older programs stored with the weights.
BUFFERS = re.compile(r"(rotary\w*\.inv_freq|\.masked_bias|embeddings\.position_ids)$")
HEAD, EMBEDDING = "lm_head.", "model.embed_tokens."

Classes = Callable[[dict], tuple[Callable[[Any], nn.Module], type]]


def load_options(path: Path, classes: Classes) -> dict[str, Any]:
    """What to have mlx-lm's `load_model` read a folder with.

    Args:
        classes: mlx-lm's own choice of a model's class and settings by its config.

    Raises:
        UserError: a file is damaged, or files of several models lie there.
    """
    config = read_config(path)
    # Of code of its own, mlx-lm asks the class itself.
    settings = None if "model_file" in config else classes(config)[1]
    return {
        "model_config": _unsaid(config, settings, set(tensor_files(path))),
        "get_model_classes": _tidying(path, classes),
    }


def _unsaid(config: dict, settings: type | None, names: set[str]) -> dict:
    """What the config leaves out, and the names of the tensors tell.

    mlx-lm ties the head of many a model that does not say, and would throw the stored
    one away; Hugging Face's programs store none where it is tied.
    """
    key = "tie_word_embeddings"
    is_asked = key in getattr(settings, "__dataclass_fields__", ())
    is_said = key in config | config.get("text_config", {})
    both = {f"{HEAD}weight", f"{EMBEDDING}weight"} <= names
    return {key: False} if both and is_asked and not is_said else {}


def _tidying(path: Path, classes: Classes) -> Classes:
    """Classes whose models tidy the tensors of `path` before they take them."""

    def tidy(config: dict) -> tuple[Callable[[Any], nn.Module], type]:
        make, arguments = classes(config)

        def build(settings: Any) -> nn.Module:
            model = make(settings)
            own = getattr(model, "sanitize", lambda weights: weights)
            parameters = {name for name, _ in tree_flatten(model.parameters())}

            def sanitize(_: dict[str, mx.array]) -> dict[str, mx.array]:
                # The class has its own again: a model is read once.
                del model.sanitize
                return own(_tensors(path, parameters))

            model.sanitize = sanitize
            return model

        return build, arguments

    return tidy


def _tensors(path: Path, parameters: set[str]) -> dict[str, mx.array]:
    """The tensors of a folder, unread, each from its right file and by its right name.

    Args:
        parameters: names of the model's own.
    """
    places = tensor_files(path)
    files = {file: mx.load(str(file)) for file in dict.fromkeys(places.values())}
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
