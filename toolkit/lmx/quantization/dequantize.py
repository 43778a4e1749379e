"""Convert a quantized model to a dense one and keep its codes."""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..config.quant_spec import QuantSpec
from ..errors import UserError
from ..models import global_scale, quantized_layers
from ..models.loader import LoadedModel, build_model

PackedLayers = dict[str, dict[str, mx.array]]


def layer_specs(model: nn.Module) -> dict[str, QuantSpec]:
    """Grids of the quantized layers by path."""
    return {
        path: QuantSpec(
            bits=m.bits,
            group_size=m.group_size,
            mode=m.mode,
            global_scale=global_scale.NAME in m,
        )
        for path, m in model.named_modules()
        if quantized_layers.is_quantized(m)
    }


def packed_layers(model: nn.Module) -> PackedLayers:
    """Packed codes and grids of the quantized layers by path and name."""
    return {
        path: {n: module[n] for n in quantized_layers.TENSORS if n in module}
        for path, module in model.named_modules()
        if quantized_layers.is_quantized(module)
    }


def dequantized_model(
    loaded: LoadedModel, dtype: mx.Dtype
) -> tuple[LoadedModel, PackedLayers]:
    """The model with dense layers, and the packed tensors of its quantized layers.

    Args:
        dtype: of the dequantized weights. float32 is lossless: every weight is nearest
            to its own code.

    Raises:
        UserError: the model has its own code (`model_file`).
    """
    if "model_file" in loaded.config:
        raise UserError(
            "a quantized model with its own code (`model_file`) cannot be dequantized",
            place=str(loaded.path),
            hint="start from the unquantized model",
        )
    tensors = dict(tree_flatten(loaded.model.parameters()))
    packed, modules = packed_layers(loaded.model), dict(loaded.model.named_modules())
    for path, stored in packed.items():
        for name in stored:
            del tensors[f"{path}.{name}"]
        dense = quantized_layers.dequantize(modules[path], stored)
        tensors[f"{path}.weight"] = dense.astype(dtype)
    config = {k: v for k, v in loaded.config.items() if "quantization" not in k}
    model = build_model(config)
    model.load_weights(list(tensors.items()))
    mx.eval(model.parameters())
    return replace(loaded, model=model), packed
