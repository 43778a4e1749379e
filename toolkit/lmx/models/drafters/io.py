"""Folders of drafters: config.json and weights in the formats that others read."""

import json
import os
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ...errors import UserError
from ...files.atomic import write_atomic
from ...files.json_files import read_json
from ..blockwise import NoTrunkHeadSplit, cast
from ..checkpoint import check_weights, require_own_files, tensor_files
from ..dtypes import stored_dtype
from ..hooks import require_hidden_states
from ..loader import checkpoint_folder, download_snapshot
from ..safetensors_io import (
    read_tensors,
    require_finite,
    require_tensors,
    write_safetensors,
)
from .base import Drafter, TargetHead
from .configs import AttentionConfig
from .dflash import DFlashDrafter
from .eagle3 import Eagle3Drafter

ARCHITECTURES: dict[str, type[Drafter]] = {
    cls.architecture: cls for cls in (Eagle3Drafter, DFlashDrafter)
}
WEIGHTS_FILE = "model.safetensors"
OWN_SIZES = AttentionConfig.model_fields.keys() - {"vocab_size"}


def drafter_class(config: dict) -> type[Drafter] | None:
    """The class of a config.json; None if it belongs to no drafter that lmx knows."""
    return next((cls for cls in ARCHITECTURES.values() if cls.matches(config)), None)


def is_drafter(source: str | Path) -> bool:
    """Whether a folder or Hub id has a drafter on hidden states."""
    folder = Path(os.path.expanduser(source))
    if not os.path.exists(folder):
        try:
            folder = download_snapshot(source)
        except UserError:  # who loads a model of this name says what is wrong
            return False
    file = folder / "config.json"
    return file.is_file() and drafter_class(read_json(file)) is not None


def bind_target(drafter: Drafter, target: nn.Module, *, place: str) -> Drafter:
    """Give a drafter the embedding, the LM head and the dtype of its target.

    Raises:
        UserError: it was made for a target of another shape, or the hidden states of
            this one cannot be read.
    """
    drafter.choose_layers(len(target.layers))
    width = require_hidden_states(target, drafter.layer_ids, place=place)
    try:
        head = TargetHead(target)
    except NoTrunkHeadSplit as reason:
        raise UserError(
            f"a drafter cannot share the LM head of this model: {reason}",
            place=place,
            hint="architecture: model works with every target",
        ) from reason
    drafter.require_shape(width, head.vocab_size, place=place)
    drafter.set_dtype(stored_dtype(target))
    return drafter.bind(head)


def load_drafter(source: str | Path, target: nn.Module) -> Drafter:
    """Load the drafter of a folder or Hub id, for this target.

    Raises:
        UserError: see `read_drafter`; or it was made for another target.
    """
    folder = checkpoint_folder(source)
    return bind_target(read_drafter(folder), target, place=str(folder))


def read_drafter(folder: Path) -> Drafter:
    """The drafter of a folder, in the type that it is stored in, without a target.

    Raises:
        UserError: it is no drafter, or its files are damaged or incomplete.
    """
    place = str(folder)
    require_own_files(folder)
    config = read_json(folder / "config.json")
    cls = drafter_class(config)
    if cls is None:
        raise UserError("this is no drafter that lmx knows", place=place)
    layer = config.get("transformer_layer_config")
    sizes = config | (layer if isinstance(layer, dict) else {})
    # Those of the target, such as its number of layers, are in the file, too.
    check_weights(folder, {k: sizes[k] for k in OWN_SIZES if k in sizes})
    drafter = cls.from_config(config, place=str(folder / "config.json"))
    weights = {
        name: tensor
        for file in sorted(set(tensor_files(folder).values()))
        for name, tensor in read_tensors(file).items()
    }
    weights = drafter.sanitize(weights)
    parameters = dict(tree_flatten(drafter.parameters()))
    hint = "it is damaged, or of another version or architecture"
    require_tensors(weights, parameters, place=place, hint=hint)
    require_finite(folder)
    drafter.load_weights(list(weights.items()))
    mx.eval(drafter.parameters())
    return drafter


def save_drafter(folder: Path, drafter: Drafter, dtype: mx.Dtype) -> None:
    """Write config.json and weights into an existing folder.

    Args:
        dtype: of all floating-point weights.
    """
    exported = drafter.export_weights()
    weights = {name: cast(value, dtype) for name, value in exported.items()}
    write_safetensors(folder / WEIGHTS_FILE, weights)
    config = drafter.to_config() | {"torch_dtype": str(dtype).rpartition(".")[2]}
    write_atomic(folder / "config.json", json.dumps(config, indent=2) + "\n")
