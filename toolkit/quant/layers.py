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
    specs, kept = {}, {}
    for path, module in model.named_modules():
        if not hasattr(module, "to_quantized"):
            continue
        asked = True if predicate is None else predicate(path, module)
        wanted = _asked(asked, quantization)
        if isinstance(module, nn.Embedding) and not quantization.embeddings:
            kept[path] = "embeddings are kept by choice"
        elif path.endswith("lm_head") and not quantization.head:
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


def _asked(answer: bool | dict, default: QuantSpec) -> QuantSpec | None:
    """The grid a model's predicate asks for: none, the default, or its own."""
    if not answer:
        return None
    grid = default.model_dump() | (answer if isinstance(answer, dict) else {})
    return QuantSpec(**{k: grid[k] for k in QuantSpec.model_fields})
