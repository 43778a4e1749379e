"""Helpers that export test checkpoints."""

from functools import partial

import mlx.core as mx
from lmx.config.quant_spec import QuantSpec
from lmx.convert.exporters.base import ExportContext
from lmx.models import checkpoint_writer
from lmx.models.loader import load
from lmx.quantization.packing import pack
from mlx.utils import tree_flatten


def export(module, model, target, *, adapters=None, draft=None):
    """Export a model with an exporter module and return the log lines."""
    lines = []
    target.mkdir()
    load_stored = partial(load, compute="stored", lazy=True)
    context = ExportContext("name", model, adapters, load_stored, lines.append, draft)
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


def pack_layers(source, specs):
    """Layers of a checkpoint on their grids, as `quantized_checkpoint` takes them."""
    loaded = load(source, compute="stored")
    modules = dict(loaded.model.named_modules())
    return {
        path: (pack(modules[path].weight, spec, loaded.dtype), spec)
        for path, spec in specs.items()
    }


def write_quantized(source, target, packed, kept=()):
    """Write a checkpoint with the quantized layers in `packed`; returns its tensors.

    Args:
        packed: layer path -> (tensors by leaf name, quantization spec).
        kept: layers that are not quantized.
    """
    loaded = load(source, compute="stored")
    weights = dict(tree_flatten(loaded.model.parameters()))
    for path, (tensors, _) in packed.items():
        weights |= {f"{path}.{leaf}": value for leaf, value in tensors.items()}
    specs = {path: spec for path, (_, spec) in packed.items()}
    options = {"companions": loaded.path, "specs": specs, "kept": list(kept)}
    target.mkdir()
    checkpoint_writer.write_checkpoint(target, dict(weights), loaded.config, **options)
    return weights


def quantized_checkpoint(source, target, packed):
    """Write a checkpoint with the quantized layers in `packed`; returns its folder."""
    write_quantized(source, target, packed)
    return target
