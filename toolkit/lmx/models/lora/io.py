"""Adapters on disk, in mlx-lm's format."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ...config.lora import LoRAConfig
from ...errors import UserError
from ...run.fs import read_json
from ..quantized_layers import is_quantized

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapters.safetensors"
# mlx-lm's DoRA takes the width of packed codes for a multiple of whole 32 / bits.
UNEVEN_BITS = (3, 5, 6)


def save_adapter(
    folder: Path,
    parameters: dict[str, mx.array],
    *,
    layers: dict[str, nn.Module],
    adapter: LoRAConfig,
    keys: list[str],
    num_layers: int,
    base: str | None = None,
) -> None:
    """Write adapters.safetensors and adapter_config.json for mlx-lm.

    The format has one rank and one scale. Layers of a smaller rank are padded with
    zeros, which add nothing. Where scales differ, the file's scale is 1 and every B is
    multiplied by its own. QA-LoRA is written as plain LoRA. Stock mlx-lm loads all
    layers but those of `layers_mlx_lm_cannot_load`.

    Args:
        parameters: the trained parameters, by path.
        layers: the adapted layers by path, from `adapted_layers`.
        keys: the adapted paths within a block, or whole paths outside the blocks.
        num_layers: the real number of adapted blocks: mlx-swift cannot read -1.
        base: the name of the base model.
    """
    rank = max(_rank(layer) for layer in layers.values())
    scales = {layer.scale for layer in layers.values()}
    scale = scales.pop() if len(scales) == 1 else 1.0
    tensors = {}
    for path, layer in layers.items():
        trained = {name: parameters[f"{path}.{name}"] for name in layer.TRAINABLE}
        for name, value in trained.items():
            if name == "lora_b" and layer.scale != scale:
                value = (layer.scale / scale) * value
            tensors[f"{path}.{name}"] = _pad_rank(
                value, layer.RANK_AXIS.get(name), rank
            )
    mx.save_safetensors(str(folder / WEIGHTS_FILE), tensors)
    config = {
        "model": base,
        "fine_tune_type": "dora" if adapter.type == "dora" else "lora",
        "num_layers": num_layers,
        "lora_parameters": {
            "rank": rank,
            "scale": scale,
            "dropout": adapter.dropout,
            "keys": keys,
        },
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=4) + "\n")


def layers_mlx_lm_cannot_load(layers: dict[str, nn.Module]) -> list[str]:
    """Adapted layers whose widths stock mlx-lm computes wrongly.

    These are DoRA on linear layers of 3, 5 or 6 bits, and on quantized embeddings.
    """
    return [
        path
        for path, layer in layers.items()
        if "m" in layer.TRAINABLE
        and is_quantized(layer.base_layer)
        and ("embedding" in layer or layer.base_layer.bits in UNEVEN_BITS)
    ]


def _rank(layer: nn.Module) -> int:
    return layer.lora_a.shape[layer.RANK_AXIS["lora_a"]]


def _pad_rank(value: mx.array, axis: int | None, rank: int) -> mx.array:
    if axis is None:
        return value
    padding = [(0, 0)] * value.ndim
    padding[axis] = (0, rank - value.shape[axis])
    return mx.pad(value, padding)


def init_adapter(layers: dict[str, nn.Module], folder: Path) -> None:
    """Initialize adapted layers with the matrices of a trained adapter.

    Scales may differ. In a layer of a higher rank, the additional ranks of A keep their
    initial values and those of B stay zero. A layer that the adapter does not have
    keeps its initial values.

    Args:
        layers: the adapted layers by path, from `adapted_layers`.
        folder: an adapter in mlx-lm's format.

    Raises:
        UserError: the adapter has other layers, another type or a higher rank.
    """
    place = str(folder)
    config_file, file = folder / CONFIG_FILE, folder / WEIGHTS_FILE
    config = read_json(config_file) if config_file.is_file() else {}
    if "lora_parameters" not in config or not file.is_file():
        raise UserError("this is no low-rank adapter", place=place)
    scale = config["lora_parameters"]["scale"]
    trained: dict[str, dict[str, mx.array]] = {}
    for name, value in mx.load(str(file)).items():
        path, _, leaf = name.rpartition(".")
        trained.setdefault(path, {})[leaf] = value.astype(mx.float32)
    for path, tensors in trained.items():
        layer = layers.get(path)
        if layer is None or tensors.keys() != {*layer.TRAINABLE}:
            raise UserError(
                f"the adapter has {', '.join(sorted(tensors))} of {path}, which this "
                "training does not adapt so",
                place=place,
                hint="give adapter.type and adapter.target_modules as they were",
            )
        tensors["lora_b"] = scale / layer.scale * tensors["lora_b"]
        for leaf, value in tensors.items():
            layer[leaf] = _fill_ranks(layer, leaf, value, f"{folder}: {path}.{leaf}")


def _fill_ranks(layer: nn.Module, leaf: str, value: mx.array, place: str) -> mx.array:
    """A layer's tensor with `value` in its first ranks."""
    initial, axis = layer[leaf], layer.RANK_AXIS.get(leaf)
    expected = list(initial.shape)
    if axis is not None and value.ndim == initial.ndim:
        expected[axis] = min(initial.shape[axis], value.shape[axis])
    if list(value.shape) != expected:
        raise UserError(
            f"the shape is {list(value.shape)}; this training has "
            f"{list(initial.shape)}",
            place=place,
            hint="is it of this model, and of no higher rank than adapter.rank?",
        )
    if axis is None:
        return value
    _, additional = mx.split(initial, [value.shape[axis]], axis=axis)
    return mx.concatenate([value, additional], axis=axis)
