"""Adapters on disk, in mlx-lm's format."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from . import weights
from .settings import Adapter

# mlx-lm's DoRA takes the width of packed codes for a multiple of whole 32 / bits.
UNEVEN_BITS = (3, 5, 6)


def save(
    folder: Path,
    parameters: dict[str, mx.array],
    *,
    layers: dict[str, nn.Module],
    adapter: Adapter,
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


def unreadable(layers: dict[str, nn.Module]) -> list[str]:
    """Adapted layers that stock mlx-lm cannot load, for it gets their widths wrong.

    They are DoRA on linear layers of 3, 5 or 6 bits, and on quantized embeddings.
    """
    return [
        path
        for path, layer in layers.items()
        if "m" in layer.TRAINED
        and weights.is_quantized(layer.frozen)
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
