"""From another program's checkpoint to a folder of MLX's, and never rounded again."""

from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ...config.quant_spec import QuantSpec
from ...errors import UserError
from ...models import checkpoint_writer
from ...models.loader import build_model
from . import gguf, hf_folder
from .affine_repack import SIZES, Groups

WIDTHS = (2, 3, 4, 5, 6, 8)


def convert(source: Path, target: Path, dtype: mx.Dtype | None = None) -> None:
    """Write a checkpoint of MLX's with the weights of `source`.

    Args:
        target: a folder, existing and empty.
        dtype: what scales, biases and dense weights are rounded to; None = nothing is.

    Raises:
        UserError: naming the tensor that is damaged or that MLX cannot hold as it is.
    """
    with TemporaryDirectory() as scratch:
        if source.is_dir():
            companions = source
            config, dense, layers = hf_folder.read(source)
        else:
            companions = Path(scratch)
            config, dense, layers = gguf.read(source, companions)
        model = build_model(config)
        weights = _renamed(model, dense, layers, place=str(source))
        modules = {
            path: module
            for path, module in model.named_modules()
            if hasattr(module, "to_quantized")
        }
        weights, specs = _fitted(weights, model, modules, place=str(source))
        if dtype:
            weights = {name: _cast(value, dtype) for name, value in weights.items()}
        kept = [path for path in modules if path not in specs]
        checkpoint_writer.write_checkpoint(
            target, weights, config, companions=companions, specs=specs, kept=kept
        )


def _renamed(
    model: nn.Module,
    dense: dict[str, mx.array],
    layers: dict[str, Groups],
    *,
    place: str,
) -> dict[str, mx.array]:
    """All tensors by the names mlx-lm has for them, experts joined.

    Its models rename what is called weight, and few of them scales and biases, too. So
    these are passed in turn as if they were weights.
    """
    tensors = {path: layer.tensors() for path, layer in layers.items()}
    sanitize = getattr(model, "sanitize", lambda weights: weights)
    found: dict[str, mx.array] = {}
    for leaf in ("weight", "scales", "biases"):
        parts = {f"{path}.weight": own[leaf] for path, own in tensors.items()}
        try:
            names = sanitize(dense | parts)
        except (ValueError, KeyError) as error:
            raise UserError(
                f"mlx-lm's model cannot take these tensors: {error}", place=place
            ) from error
        found = found or names
        # Only words are of this type, joined or not.
        for name in [n for n in names if found[n].dtype == mx.uint32]:
            found[name.removesuffix("weight") + leaf] = names[name]
    return found


def _fitted(
    weights: dict[str, mx.array],
    model: nn.Module,
    modules: dict[str, nn.Module],
    *,
    place: str,
) -> tuple[dict[str, mx.array], dict[str, QuantSpec]]:
    """The weights, each known to fit into the model, and the grids of its layers."""
    wanted = {name: value.shape for name, value in tree_flatten(model.parameters())}
    specs = {
        path: _spec(weights, path, wanted[f"{path}.weight"], place)
        for path in modules
        if f"{path}.scales" in weights
    }
    fitted = {}
    for name, value in weights.items():
        path, _, leaf = name.rpartition(".")
        packed = path in specs and leaf in ("weight", "scales", "biases")
        if packed or value.shape == wanted.get(name):
            fitted[name] = value
        # AutoGPTQ gives every layer a bias, of zeros where the model has none.
        elif name in wanted or leaf != "bias" or value.any().item():
            raise UserError(_misfit(name, value.shape, wanted.get(name)), place=place)
    if missing := sorted(wanted.keys() - fitted.keys()):
        raise UserError(f"the tensor {missing[0]} is missing", place=place)
    return fitted, specs


def _misfit(name: str, shape: tuple[int, ...], wanted: tuple[int, ...] | None) -> str:
    if wanted is None:
        return f"the tensor {name} has no place in mlx-lm's model of this config"
    return f"{name} is {list(shape)}, but the config wants {list(wanted)}"


def _spec(
    weights: dict[str, mx.array], path: str, shape: tuple[int, ...], place: str
) -> QuantSpec:
    words, scales = weights[f"{path}.weight"], weights[f"{path}.scales"]
    bits = words.shape[-1] * 32 / shape[-1]
    size = shape[-1] / scales.shape[-1]
    if words.shape[:-1] != shape[:-1] or bits not in WIDTHS or size not in SIZES:
        inputs = f"{list(words.shape[:-1])} rows of {words.shape[-1]} words"
        raise UserError(
            f"{path} has {inputs}, but the config wants a matrix {list(shape)}",
            place=place,
        )
    return QuantSpec(bits=int(bits), group_size=int(size))


def _cast(value: mx.array, dtype: mx.Dtype) -> mx.array:
    return value.astype(dtype) if mx.issubdtype(value.dtype, mx.floating) else value
