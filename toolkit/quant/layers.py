"""Which layers of a model are quantized, on which grid, and which are kept."""

from dataclasses import dataclass

import mlx.nn as nn

from ..errors import UserError
from .spec import Quantization, QuantSpec


@dataclass(frozen=True)
class Selection:
    """Grids by path of the layers to quantize; reasons by path of those kept."""

    specs: dict[str, QuantSpec]
    kept: dict[str, str]


def select(model: nn.Module, quantization: Quantization) -> Selection:
    """Choose a grid for every layer that can be quantized.

    The model's own `quant_predicate` may keep a layer or ask other bits for it. A
    layer whose width no group divides is kept.

    Raises:
        UserError: nothing is left to quantize.
    """
    predicate = getattr(model, "quant_predicate", None)
    modules = dict(model.named_modules())
    heads = _heads(modules)
    specs, kept = {}, {}
    for path, module in modules.items():
        if not hasattr(module, "to_quantized"):
            continue
        asked = True if predicate is None else predicate(path, module)
        wanted = _asked(asked, quantization)
        if isinstance(module, nn.Embedding) and not quantization.embeddings:
            kept[path] = "embeddings are kept by choice"
        elif path in heads and not quantization.head:
            kept[path] = "the head is kept by choice"
        elif wanted is None:
            kept[path] = "the model asks to keep it"
        elif not wanted.fits(module.weight.shape[-1]):
            width, group = module.weight.shape[-1], wanted.group_size
            kept[path] = f"its width {width} is no multiple of {group}"
        else:
            specs[path] = wanted
    if not specs:
        reasons = "; ".join(sorted(set(kept.values()))) or "it has no linear layer"
        raise UserError(f"nothing of this model can be quantized: {reasons}")
    return Selection(specs, kept)


def _heads(modules: dict[str, nn.Module]) -> set[str]:
    """Linear layers with an output for every token of an embedding."""
    tokens = {m.weight.shape[0] for m in modules.values() if type(m) is nn.Embedding}
    return {
        path
        for path, module in modules.items()
        if isinstance(module, nn.Linear) and module.weight.shape[0] in tokens
        # No block's layer, though it may have as many outputs by accident.
        if not any(part.isdecimal() for part in path.split("."))
    }


def _asked(answer: bool | dict, default: QuantSpec) -> QuantSpec | None:
    """The grid a model's predicate asks for: none, the default, or its own.

    A grid without a mode is affine, as mlx-lm reads it; the default completes what is
    of its own mode.
    """
    if not answer:
        return None
    fields = QuantSpec.model_fields
    grid = default.model_dump(include=set(fields))
    if isinstance(answer, dict):
        own = {"mode": "affine"} | {k: v for k, v in answer.items() if k in fields}
        grid = (grid if own["mode"] == default.mode else {}) | own
    return QuantSpec(**grid)
