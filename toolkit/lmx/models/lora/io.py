"""Adapters on disk, in mlx-lm's format."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ...config.lora import LoRAConfig
from ...errors import UserError
from . import base_layer

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
    """Write adapters.safetensors and adapter_config.json as mlx-lm loads them.

    The format knows one rank and one scale. Layers of a smaller rank get zeros up to
    the largest, which add nothing; where scales differ the file's is 1 and every B is
    multiplied by its own. QA-LoRA's are spread to plain LoRA's. Stock mlx-lm loads all
    but those of `unreadable`.

    Args:
        parameters: the trained ones, by path.
        layers: the adapted layers by path, as `adapted` gives them.
        keys: the adapted paths within a block, or whole ones outside the blocks.
        num_layers: the real number of adapted blocks: mlx-swift cannot read -1.
        base: the name of the model that is adapted.
    """
    rank = max(_rank(layer) for layer in layers.values())
    scales = {layer.scale for layer in layers.values()}
    scale = scales.pop() if len(scales) == 1 else 1.0
    tensors = {}
    for path, layer in layers.items():
        trained = {name: parameters[f"{path}.{name}"] for name in layer.TRAINED}
        if adapter.type == "qa_lora":
            trained = layer.spread(trained)
        for name, value in trained.items():
            if name == "lora_b" and layer.scale != scale:
                value = (layer.scale / scale) * value
            tensors[f"{path}.{name}"] = _widened(value, layer.RANK_AXIS.get(name), rank)
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
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
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=4) + "\n")


def layers_mlx_lm_cannot_load(layers: dict[str, nn.Module]) -> list[str]:
    """Adapted layers that stock mlx-lm cannot load, for it gets their widths wrong.

    They are DoRA on linear layers of 3, 5 or 6 bits, and on quantized embeddings.
    """
    return [
        path
        for path, layer in layers.items()
        if "m" in layer.TRAINED
        and base_layer.is_quantized(layer.frozen)
        and ("embedding" in layer or layer.frozen.bits in UNEVEN_BITS)
    ]


def _rank(layer: nn.Module) -> int:
    return layer.lora_a.shape[layer.RANK_AXIS["lora_a"]]


def _widened(value: mx.array, axis: int | None, rank: int) -> mx.array:
    if axis is None:
        return value
    missing = [(0, 0)] * value.ndim
    missing[axis] = (0, rank - value.shape[axis])
    return mx.pad(value, missing)


# --- from model.adapters.begin: A trained adapter as the beginning of another training.


def init_adapter(layers: dict[str, nn.Module], folder: Path) -> None:
    """Give adapted layers the matrices of an adapter, whatever their scales are.

    A layer of a higher rank keeps what it drew for the rest of A, while B is zero
    there; a layer that the adapter leaves alone begins as without it.

    Args:
        layers: the adapted ones by path, as `lora.adapted` gives them.
        folder: an adapter in mlx-lm's format.

    Raises:
        UserError: it adapts other layers, in another way, or at a higher rank.
    """
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
            layer[leaf] = _assign(layer, leaf, value, f"{folder}: {path}.{leaf}")


def _assign(layer: nn.Module, leaf: str, value: mx.array, place: str) -> mx.array:
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
