"""A trained adapter as the beginning of another training."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ...errors import UserError
from ..foreign.peft import resolve


def begin(layers: dict[str, nn.Module], folder: Path) -> None:
    """Give adapted layers the matrices of an adapter, whatever their scales are.

    A layer of a higher rank keeps what it drew for the rest of A, while B is zero
    there; a layer that the adapter leaves alone begins as without it.

    Args:
        layers: the adapted ones by path, as `lora.adapted` gives them.
        folder: in mlx-lm's format or peft's.

    Raises:
        UserError: it adapts other layers, in another way, or at a higher rank.
    """
    folder = resolve(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    file = folder / "adapters.safetensors"
    if "lora_parameters" not in config or not file.is_file():
        raise UserError("this is no low-rank adapter", place=str(folder))
    scale = config["lora_parameters"]["scale"]
    found: dict[str, dict[str, mx.array]] = {}
    for name, value in mx.load(str(file)).items():
        path, _, leaf = name.rpartition(".")
        found.setdefault(path, {})[leaf] = value.astype(mx.float32)
    for path, tensors in found.items():
        layer = layers.get(path)
        if layer is None or tensors.keys() != {*layer.TRAINED}:
            raise UserError(
                f"the adapter has {', '.join(sorted(tensors))} of {path}, which this "
                "training does not adapt so",
                place=str(folder),
                hint="give adapter.type and adapter.layers as they were",
            )
        tensors["lora_b"] = scale / layer.scale * tensors["lora_b"]
        for leaf, value in tensors.items():
            layer[leaf] = _put(layer, leaf, value, f"{folder}: {path}.{leaf}")


def _put(layer: nn.Module, leaf: str, value: mx.array, place: str) -> mx.array:
    """A layer's tensor with this one in place of its first ranks."""
    own, axis = layer[leaf], layer.RANK_AXIS.get(leaf)
    wanted = list(own.shape)
    if axis is not None and value.ndim == own.ndim:
        wanted[axis] = min(own.shape[axis], value.shape[axis])
    if list(value.shape) != wanted:
        raise UserError(
            f"the shape is {list(value.shape)}; this training wants {list(own.shape)}",
            place=place,
            hint="is it of this model, and of no higher rank than adapter.rank?",
        )
    if axis is None:
        return value
    _, rest = mx.split(own, [value.shape[axis]], axis=axis)
    return mx.concatenate([value, rest], axis=axis)
