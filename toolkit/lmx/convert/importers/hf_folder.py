"""Hugging Face folders of safetensors whose layers are quantized in another format."""

from pathlib import Path
from types import ModuleType

import mlx.core as mx

from ...errors import UserError
from ...models.checkpoint import read_config
from ...models.config_check import check_sizes
from ...models.safetensors_io import read_tensors
from . import awq, compressed_tensors, gptq
from .affine_repack import AffineGroups

# The modules by the `quant_method` of a config. A module has `reads`, `read_layer`,
# `LEAVES` (the tensors of a layer) and `CODES` (the tensor that every layer has).
FORMATS = {"awq": awq, "compressed-tensors": compressed_tensors, "gptq": gptq}


def find_format(config: dict) -> ModuleType | None:
    """The module that reads the format of a checkpoint, if one does."""
    settings = _quantization_config(config)
    return next((m for m in FORMATS.values() if m.reads(settings)), None)


def _quantization_config(config: dict) -> dict:
    # MLX checkpoints have the block too, without a `quant_method`.
    for block in (config, config.get("text_config") or {}):
        if isinstance(block.get("quantization_config"), dict):
            return block["quantization_config"]
    return {}


def read(path: Path) -> tuple[dict, dict[str, mx.array], dict[str, AffineGroups]]:
    """Config, dense tensors and quantized layers of a folder, by their names there.

    Raises:
        UserError: files are damaged, tensors do not fit together, or MLX lacks the
            group size.
    """
    config = read_config(path)
    module, settings = find_format(config), _quantization_config(config)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise UserError("the folder has no *.safetensors", place=str(path))
    dense = {k: v for file in files for k, v in read_tensors(file).items()}
    shapes = {name: value.shape for name, value in dense.items()}
    check_sizes(config, shapes, str(path / "config.json"))
    layers = {}
    for codes in sorted(name for name in dense if name.endswith(f".{module.CODES}")):
        name = codes.removesuffix(f".{module.CODES}")
        leaves = [leaf for leaf in module.LEAVES if f"{name}.{leaf}" in dense]
        tensors = {leaf: dense.pop(f"{name}.{leaf}") for leaf in leaves}
        layers[name] = module.read_layer(tensors, settings, name)
    for name in dense:
        if name.rpartition(".")[2] in module.LEAVES:
            raise UserError(
                f"the tensor {module.CODES} of this layer is missing", place=name
            )
    gptq.undo_activation_order(layers, dense)
    return config, dense, layers
