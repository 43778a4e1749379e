"""A folder of safetensors with layers quantized in one of the formats beside this."""

from pathlib import Path
from types import ModuleType

import mlx.core as mx

from ...errors import UserError
from ...models.checkpoint import read_config
from ...models.safetensors_io import read_header
from . import act_order, awq, compressed_tensors, gptq
from .affine_repack import Groups

FORMATS = (awq, compressed_tensors, gptq)


def format_of(config: dict) -> ModuleType | None:
    """The module that reads a checkpoint's format, if it is one of these."""
    settings = _settings(config)
    return next((module for module in FORMATS if module.reads(settings)), None)


def _settings(config: dict) -> dict:
    # MLX's own checkpoints have such a block too, with no method in it.
    for part in (config, config.get("text_config") or {}):
        if isinstance(part.get("quantization_config"), dict):
            return part["quantization_config"]
    return {}


def read(path: Path) -> tuple[dict, dict[str, mx.array], dict[str, Groups]]:
    """Config, dense tensors and quantized layers of a folder, by their names there.

    Raises:
        UserError: damaged files, tensors that do not fit together, groups MLX lacks.
    """
    config = read_config(path)
    module, settings = format_of(config), _settings(config)
    dense = _tensors(path)
    layers = {}
    for mark in sorted(name for name in dense if name.endswith(f".{module.MARK}")):
        name = mark.removesuffix(f".{module.MARK}")
        present = [leaf for leaf in module.LEAVES if f"{name}.{leaf}" in dense]
        parts = {leaf: dense.pop(f"{name}.{leaf}") for leaf in present}
        layers[name] = module.layer(parts, settings, name)
    for name in dense:
        if name.rpartition(".")[2] in module.LEAVES:
            raise UserError(
                f"the tensor {module.MARK} of this layer is missing", place=name
            )
    act_order.settle(layers, dense)
    return config, dense, layers


def _tensors(path: Path) -> dict[str, mx.array]:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise UserError("no *.safetensors here", place=str(path))
    found = {}
    for file in files:
        read_header(file)
        found |= mx.load(str(file))
    return found
