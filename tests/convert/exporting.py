"""Helpers that export test checkpoints."""

from functools import partial

import mlx.core as mx
from lmx.config.quant_spec import QuantSpec
from lmx.convert.exporters.base import ExportContext
from lmx.models import checkpoint_writer
from lmx.models.loader import load
from mlx.utils import tree_flatten


def export(module, model, target, *, adapters=None):
    """Export a model with an exporter module and return the log lines."""
    lines = []
    target.mkdir()
    load_stored = partial(load, compute="stored", lazy=True)
    context = ExportContext("name", model, adapters, load_stored, lines.append)
    module.export(target, context)
    return lines


def float_codes(model, mode):
    """All layers of a model, quantized in a floating-point mode of MLX.

    Returns:
        what `quantized_checkpoint` takes.
    """
    spec = QuantSpec(mode=mode)
    codes = {}
    for path, module in model.named_modules():
        if hasattr(module, "to_quantized"):
            weight, scales = mx.quantize(module.weight, mode=mode)
            codes[path] = ({"weight": weight, "scales": scales}, spec)
    return codes


def quantized_checkpoint(source, target, packed):
    """Write a checkpoint with the quantized layers in `packed`.

    Args:
        packed: layer path -> (tensors by leaf name, quantization spec).
    """
    loaded = load(source, compute="stored")
    weights = dict(tree_flatten(loaded.model.parameters()))
    for path, (tensors, _) in packed.items():
        weights |= {f"{path}.{leaf}": value for leaf, value in tensors.items()}
    specs = {path: spec for path, (_, spec) in packed.items()}
    target.mkdir()
    checkpoint_writer.write_checkpoint(
        target, weights, loaded.config, companions=loaded.path, specs=specs
    )
    return target
