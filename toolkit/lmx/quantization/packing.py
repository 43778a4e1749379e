"""Quantize and dequantize weights as a checkpoint stores them."""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..config.quant_spec import K_BLOCK, QuantSpec
from ..errors import UserError
from ..models import global_scale, quantized_layers
from ..models.loader import LoadedModel, build_model
from . import gguf_grid


def pack(weight: mx.array, spec: QuantSpec, dtype: mx.Dtype) -> dict[str, mx.array]:
    """Quantize a weight [..., K] with RTN on the grid of MLX or GGUF.

    Args:
        dtype: dtype that the checkpoint stores. The weight is cast to it first, because
            the codes depend on the dtype. Grids of GGUF are always float32.

    Returns:
        The stored tensors: weight (packed codes), scales, biases if affine, and
        global_scale if the grid has it. See `QuantSpec.stored` for the grids of GGUF.
    """
    if spec.is_gguf:
        return gguf_grid.pack(weight, spec)
    if spec.global_scale:
        return global_scale.quantize(weight.astype(dtype))
    tensors = mx.quantize(
        weight.astype(dtype),
        group_size=spec.group_size,
        bits=spec.bits,
        mode=spec.mode,
    )
    return dict(zip(("weight", "scales", "biases"), tensors, strict=False))


def packed_bytes(
    size: int, spec: QuantSpec, dtype: mx.Dtype, *, num_experts: int = 0
) -> int:
    """Size in bytes of the packed tensors of this many weights.

    Args:
        num_experts: experts that have a global scale, if the grid has it.
    """
    if spec.stored is None:
        # The factors of a block: see `models.gguf_scales`.
        factors = mx.float16.size + K_BLOCK // spec.group_size
        return size * mx.float32.size + size // K_BLOCK * factors
    scale = mx.float32 if spec.is_gguf else dtype
    group_bytes = 2 * scale.size if spec.stored.mode == "affine" else 1
    global_bytes = num_experts * mx.float32.size if spec.global_scale else 0
    return size * spec.bits // 8 + size // spec.group_size * group_bytes + global_bytes


def dequantize(
    tensors: dict[str, mx.array], spec: QuantSpec, dtype: mx.Dtype
) -> mx.array:
    """The weight [..., K] of packed tensors, computed in `dtype`; in float32 on a grid
    of GGUF, as llama.cpp computes it, and with a global scale."""
    if spec.stored is None:
        return tensors["weight"]
    if spec.is_gguf:
        spec, dtype = spec.stored, mx.float32
    if spec.global_scale:
        names = "weight", "scales", global_scale.NAME
        return global_scale.dequantize(*(tensors[name] for name in names))
    return mx.dequantize(
        tensors["weight"],
        tensors["scales"],
        tensors.get("biases"),
        group_size=spec.group_size,
        bits=spec.bits,
        mode=spec.mode,
        dtype=dtype,
    )


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
    tensors, packed = dict(tree_flatten(loaded.model.parameters())), {}
    for path, module in loaded.model.named_modules():
        if not quantized_layers.is_quantized(module):
            continue
        stored = {n: module[n] for n in quantized_layers.TENSORS if n in module}
        packed[path] = stored
        for name in stored:
            del tensors[f"{path}.{name}"]
        dense = quantized_layers.dequantize(module, stored)
        tensors[f"{path}.weight"] = dense.astype(dtype)
    config = {k: v for k, v in loaded.config.items() if "quantization" not in k}
    model = build_model(config)
    model.load_weights(list(tensors.items()))
    mx.eval(model.parameters())
    return replace(loaded, model=model), packed
