"""Bits and relative weight error of every layer of a quantized model."""

import mlx.core as mx
from mlx.utils import tree_flatten

from ..models import quantized_layers
from ..models.loader import LoadedModel


def measure_layers(reference: LoadedModel, quantized: LoadedModel) -> dict[str, dict]:
    """Bits and weight error of every layer that can be quantized, by path.

    Returns:
        `bits` and `group_size` (None = unquantized); `error`, the squared distance of
        the weights from the reference's over the squared weights. It is None if other
        tensors differ: then scales have moved between layers (SmoothQuant, AWQ), and
        weights are not comparable.
    """
    before, after = (dict(m.model.named_modules()) for m in (reference, quantized))
    layers = {
        path: module
        for path, module in after.items()
        if path in before
        and (quantized_layers.is_quantized(module) or hasattr(module, "to_quantized"))
    }
    tensors, others = (
        dict(tree_flatten(m.model.parameters())) for m in (reference, quantized)
    )
    for path in layers:
        for leaf in quantized_layers.TENSORS:
            others.pop(f"{path}.{leaf}", None)
    comparable = all(
        name in tensors and mx.array_equal(tensors[name], value).item()
        for name, value in others.items()
    )
    measured = {}
    for path, module in layers.items():
        error, other = None, before[path]
        shapes = map(quantized_layers.weight_shape, (other, module))
        if comparable and len({*shapes}) == 1:
            weight, moved = map(quantized_layers.dequantized_weight, (other, module))
            error = (mx.square(moved - weight).sum() / mx.square(weight).sum()).item()
        measured[path] = {
            "bits": getattr(module, "bits", 8 * quantized.dtype.size),
            "group_size": getattr(module, "group_size", None),
            "error": error,
        }
    return measured
