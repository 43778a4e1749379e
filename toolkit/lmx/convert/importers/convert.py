"""Writes a checkpoint of another format as an MLX folder, without requantization."""

from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ...config.quant_spec import FLOAT_MODES, QuantSpec
from ...errors import UserError, library_errors
from ...models import checkpoint_writer, gguf_scales
from ...models.blockwise import cast
from ...models.checkpoint import head_config
from ...models.drafters.mtp import MODEL_TYPES, MTP_FILE, PREFIX, as_mlx, dequantize
from ...models.loader import build_model, complete_config
from ...models.safetensors_io import write_safetensors
from ..gguf.blocks import FloatGroups
from . import gguf, hf_folder
from .affine_repack import GROUP_SIZES, AffineGroups

BITS = (2, 3, 4, 5, 6, 8)
Layers = dict[str, AffineGroups | FloatGroups]


def convert_checkpoint(
    source: Path, target: Path, dtype: mx.Dtype | None = None
) -> None:
    """Write the weights of `source` as an MLX checkpoint.

    Args:
        source: a folder or a GGUF file.
        target: an existing, empty folder.
        dtype: scales, biases and dense weights are cast to it; None = they stay exact.

    Raises:
        UserError: names the tensor that is damaged or that MLX cannot hold exactly.
    """
    with TemporaryDirectory() as scratch:
        companions = source if source.is_dir() else Path(scratch)
        with library_errors("the checkpoint cannot be imported", place=source):
            if source.is_dir():
                config, dense, layers = hf_folder.read(source)
                config = complete_config(config, place=str(source / "config.json"))
                own = {f"{p}.weight": layer.packed for p, layer in layers.items()}
                own |= dense
                config |= head_config(config, own, own.__getitem__, str(source))
            else:
                config, dense, layers = gguf.read(source, companions)
            mtp = _take_mtp(config, dense, layers, place=str(source))
            model = build_model(config, place=source)
            weights = _rename(model, dense, layers, place=str(source))
            modules = {
                path: module
                for path, module in model.named_modules()
                if hasattr(module, "to_quantized")
            }
            weights, specs = _check(weights, model, modules, place=str(source))
        if dtype:
            weights = {name: cast(value, dtype) for name, value in weights.items()}
            mtp = {name: cast(value, dtype) for name, value in mtp.items()}
        unquantized = [path for path in modules if path not in specs]
        checkpoint_writer.write_checkpoint(
            target,
            weights,
            config,
            companions=companions,
            specs=specs,
            kept=unquantized,
        )
        gguf_scales.write(target, gguf_scales.read(companions))
        if mtp:
            write_safetensors(target / MTP_FILE, mtp)


def _take_mtp(
    config: dict, dense: dict[str, mx.array], layers: Layers, *, place: str
) -> dict[str, mx.array]:
    """Remove the multi-token-prediction head, which mlx-lm's models do not have.

    Returns:
        its tensors in MLX's layout, dequantized.
    """
    if config.get("model_type") not in MODEL_TYPES:
        return {}
    tensors = {n: dense.pop(n) for n in list(dense) if n.startswith(PREFIX)}
    for path in [path for path in layers if path.startswith(PREFIX)]:
        layer = layers.pop(path)
        grid = {"group_size": layer.group_size, "bits": layer.bits}
        tensors[f"{path}.weight"] = dequantize(layer.tensors(), grid)
        # AutoGPTQ gives every layer a bias, of zeros where the model has none.
        if not tensors.get(f"{path}.bias", mx.array(1)).any().item():
            del tensors[f"{path}.bias"]
    return as_mlx(tensors, place=place)


def _rename(
    model: nn.Module, dense: dict[str, mx.array], layers: Layers, *, place: str
) -> dict[str, mx.array]:
    """All tensors by mlx-lm's names, experts stacked.

    mlx-lm's `sanitize` renames tensors called weight; few models rename scales and
    biases too. So scales and biases pass through it in turn as if they were weights.
    Floating-point modes have no biases.
    """
    tensors = {path: layer.tensors() for path, layer in layers.items()}
    sanitize = getattr(model, "sanitize", lambda weights: weights)
    renamed: dict[str, mx.array] = {}
    for leaf in ("weight", "scales", "biases"):
        as_weights = {
            f"{path}.weight": parts[leaf]
            for path, parts in tensors.items()
            if leaf in parts
        }
        try:
            sanitized = sanitize(dense | as_weights)
        except (ValueError, KeyError) as error:
            raise UserError(
                f"mlx-lm's model does not accept these tensors: {error}", place=place
            ) from error
        renamed = renamed or sanitized
        # Only packed codes are uint32, stacked or not.
        for name in [n for n in sanitized if renamed[n].dtype == mx.uint32]:
            renamed[name.removesuffix("weight") + leaf] = sanitized[name]
    return renamed


def _check(
    weights: dict[str, mx.array],
    model: nn.Module,
    modules: dict[str, nn.Module],
    *,
    place: str,
) -> tuple[dict[str, mx.array], dict[str, QuantSpec]]:
    """The weights that the model has, with their shapes checked, and the specs."""
    shapes = {name: value.shape for name, value in tree_flatten(model.parameters())}
    specs = {}
    for path in (path for path in modules if f"{path}.scales" in weights):
        packed, scales = weights[f"{path}.weight"], weights[f"{path}.scales"]
        *rows, width = shapes[f"{path}.weight"]
        bits, group_size = packed.shape[-1] * 32 / width, width / scales.shape[-1]
        if f"{path}.biases" in weights:
            mode, is_known = "affine", bits in BITS and group_size in GROUP_SIZES
        else:
            grids = {grid: mode for mode, grid in FLOAT_MODES.items()}
            mode = grids.get((group_size, bits))
            is_known = mode is not None
        if [*packed.shape[:-1]] != rows or not is_known:
            raise UserError(
                f"{path} has {list(packed.shape[:-1])} rows of {packed.shape[-1]} "
                f"words, but the config requires a matrix {[*rows, width]}",
                place=place,
            )
        specs[path] = QuantSpec(bits=int(bits), group_size=int(group_size), mode=mode)
    checked = {}
    for name, value in weights.items():
        path, _, leaf = name.rpartition(".")
        is_packed = path in specs and leaf in ("weight", "scales", "biases")
        if is_packed or value.shape == shapes.get(name):
            checked[name] = value
        elif name in shapes:
            raise UserError(
                f"{name} has the shape {list(value.shape)}, but the config requires "
                f"{list(shapes[name])}",
                place=place,
            )
        # AutoGPTQ gives every layer a bias, of zeros where the model has none.
        elif leaf != "bias" or value.any().item():
            raise UserError(
                f"mlx-lm's model of this config has no tensor {name}", place=place
            )
    if missing := sorted(shapes.keys() - checked.keys()):
        raise UserError(f"the tensor {missing[0]} is missing", place=place)
    return checked, specs
