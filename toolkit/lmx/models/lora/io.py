"""Adapters on disk, in mlx-lm's format."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from pydantic import ConfigDict, Field

from ...config.lora import LoRAConfig
from ...config.validation import FileConfig
from ...errors import UserError, library_errors
from ...files.json_files import read_json
from ..quantized_layers import is_quantized
from ..safetensors_io import read_tensors, require_finite, require_tensors
from .lora_model import adapted_layers

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapters.safetensors"
# mlx-lm's DoRA takes the width of packed codes for a multiple of whole 32 / bits.
UNEVEN_BITS = (3, 5, 6)


class LoRAParameters(FileConfig):
    """mlx-lm's `lora_parameters`; `alpha` is in old files and was never read.

    Attributes:
        keys: paths within a block, or whole paths; None = all layers of the blocks.
    """

    model_config = ConfigDict(extra="forbid")

    rank: Annotated[int, Field(ge=1, lt=2**31)]
    scale: float
    dropout: Annotated[float, Field(ge=0, lt=1)]
    keys: list[str] | None = None
    alpha: float | None = None


class AdapterConfig(FileConfig):
    """mlx-lm's adapter_config.json.

    Attributes:
        num_layers: adapted blocks, from the last one; all if it is not positive.
        model: the name of the base model.
        peft_target_modules: of an import, the ends of the paths of adapted layers.
    """

    fine_tune_type: Literal["lora", "dora", "full"] = "lora"
    num_layers: int
    lora_parameters: LoRAParameters
    model: str | None = None
    peft_target_modules: list[str] = []  # noqa: RUF012

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The adapted blocks of a model."""
        return list(model.layers[-max(self.num_layers, 0) :])

    def is_peft_target(self, path: str) -> bool:
        """Whether peft adapts the layer of this path."""
        return f".{path}".endswith(tuple(f".{t}" for t in self.peft_target_modules))


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
    multiplied by its own. Stock mlx-lm loads all layers but those of
    `layers_mlx_lm_cannot_load`.

    Args:
        parameters: the trained parameters, by path.
        layers: the adapted layers by path, from `adapted_layers`.
        keys: the adapted paths within a block, or whole paths outside the blocks.
        num_layers: the real number of adapted blocks: mlx-swift cannot read -1.
        base: the name of the base model.
    """
    tensors = {}
    for path, layer in layers.items():
        trained = {name: parameters[f"{path}.{name}"] for name in layer.TRAINABLE}
        tensors[path] = trained
    write_adapter(
        folder,
        *with_one_rank(
            tensors,
            {path: layer.scale for path, layer in layers.items()},
            {path: layer.RANK_AXIS for path, layer in layers.items()},
        ),
        model=base,
        fine_tune_type="dora" if adapter.type == "dora" else "lora",
        num_layers=num_layers,
        lora_parameters={"dropout": adapter.dropout, "keys": keys},
    )


def with_one_rank(
    layers: dict[str, dict[str, mx.array]],
    scales: dict[str, float],
    axes: dict[str, dict[str, int]],
) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """The tensors by name of layers by path, and their `lora_parameters`.

    Args:
        scales, axes: the scale and the `RANK_AXIS` of every layer.
    """
    rank = max(v["lora_b"].shape[axes[p]["lora_b"]] for p, v in layers.items())
    scale = next(iter(scales.values())) if len({*scales.values()}) == 1 else 1.0
    tensors = {}
    for path, layer in layers.items():
        for leaf, value in layer.items():
            if leaf == "lora_b" and scales[path] != scale:
                value = (scales[path] / scale) * value.astype(mx.float32)
            if (axis := axes[path].get(leaf)) is not None:
                padding = [(0, 0)] * value.ndim
                padding[axis] = (0, rank - value.shape[axis])
                value = mx.pad(value, padding)
            tensors[f"{path}.{leaf}"] = value
    return tensors, {"rank": rank, "scale": scale}


def write_adapter(
    folder: Path, tensors: dict[str, mx.array], lora: dict[str, Any], **config: Any
) -> None:
    """Write an adapter into an existing folder.

    Args:
        lora: rank and scale.
        config: the keys of adapter_config.json, with further `lora_parameters`.
    """
    tensors = {name: mx.contiguous(value) for name, value in tensors.items()}
    mx.save_safetensors(str(folder / WEIGHTS_FILE), tensors)
    config["lora_parameters"] = lora | config["lora_parameters"]
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


def read_adapter(folder: Path) -> tuple[AdapterConfig, dict[str, mx.array]]:
    """The config and the tensors of an adapter in mlx-lm's format.

    Raises:
        UserError: a file is missing or damaged, or a value of the config is wrong.
    """
    config_file, file = folder / CONFIG_FILE, folder / WEIGHTS_FILE
    for path in (config_file, file):
        if not path.is_file():
            raise UserError(f"this is no adapter: no {path.name}", place=str(folder))
    config = AdapterConfig.read(read_json(config_file), place=str(config_file))
    return config, read_tensors(file)


def load_adapter(model: nn.Module, folder: Path, add_layers: Callable) -> None:
    """Add an adapter whose tensors are exactly those of its config.

    Args:
        add_layers: mlx-lm's `linear_to_lora_layers`.

    Raises:
        UserError: see `read_adapter`; or the adapter is not of this model.
    """
    config, tensors = read_adapter(folder)
    modules = model.named_modules()
    linear = [p for p, m in modules if isinstance(m, nn.Linear | nn.QuantizedLinear)]
    model.freeze()
    if config.fine_tune_type == "full":
        for block in config.blocks(model):
            block.unfreeze()
    else:
        with library_errors("the adapter does not load", place=folder):
            add_layers(
                model,
                config.num_layers,
                config.lora_parameters.model_dump(),
                use_dora=config.fine_tune_type == "dora",
            )
    expected = dict(tree_flatten(model.trainable_parameters()))
    for path in filter(config.is_peft_target, linear):
        expected.setdefault(f"{path}.lora_a", mx.zeros(0))
    hint = "is it of this model, with the adapter_config.json of its training?"
    place = str(folder / WEIGHTS_FILE)
    require_tensors(tensors, expected, place=place, hint=hint)
    model.load_weights(list(tensors.items()), strict=False)
    # Dropout is for training.
    model.eval()


def init_adapter(model: nn.Module, folder: Path) -> None:
    """Initialize the adapted layers of a model with those of a trained adapter.

    Scales may differ. In a layer of a higher rank, the additional ranks of A keep their
    initial values and those of B stay zero. A layer that the adapter does not have
    keeps its initial values.

    Args:
        folder: an adapter in mlx-lm's format.

    Raises:
        UserError: the adapter has other layers, another type or a higher rank, lacks a
            layer that its config names, cannot be read, or has a value that is NaN.
    """
    config, tensors = read_adapter(folder)
    place, lora = str(folder / WEIGHTS_FILE), config.lora_parameters
    if config.fine_tune_type == "full":
        raise UserError("this is no low-rank adapter", place=place)
    require_finite(folder)
    layers = adapted_layers(model)
    given = {name.rpartition(".")[0] for name in tensors}
    expected = {}
    # The layers that the config of the adapter names.
    blocks = (block.named_modules() for block in config.blocks(model))
    inside = {id(module): key for modules in blocks for key, module in modules}
    keys = lora.keys
    named = {
        path
        for path, layer in layers.items()
        if path in (keys or ())
        or config.is_peft_target(path)
        or (id(layer) in inside and (keys is None or inside[id(layer)] in keys))
    }
    for path in layers.keys() & (given | named):
        for leaf in layers[path].TRAINABLE:
            shape = list(layers[path][leaf].shape)
            if (axis := layers[path].RANK_AXIS.get(leaf)) is not None:
                shape[axis] = min(shape[axis], lora.rank)
            expected[f"{path}.{leaf}"] = mx.zeros(shape)
    hint = "give adapter.type and target_modules as they were, and no lower rank"
    require_tensors(tensors, expected, place=place, hint=hint)
    for name, value in tensors.items():
        path, _, leaf = name.rpartition(".")
        layer, value = layers[path], value.astype(mx.float32)
        if leaf == "lora_b":
            value = lora.scale / layer.scale * value
        if (axis := layer.RANK_AXIS.get(leaf)) is not None:
            _, additional = mx.split(layer[leaf], [lora.rank], axis=axis)
            value = mx.concatenate([value, additional], axis=axis)
        layer[leaf] = value
