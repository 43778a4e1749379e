"""Which layers of a model are quantized, on which grid, and which are kept."""

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import mlx.nn as nn

from ..config.quant_spec import SKIP, QuantizationConfig, QuantSpec
from ..errors import UserError

# What comes before the path of a layer within its block.
BLOCK = re.compile(r"^.*?\.\d+\.")


@dataclass(frozen=True)
class QuantizationPlan:
    """Grids by path of the layers to quantize; reasons by path of those kept.

    Attributes:
        asked: paths whose grid the recipe names or the model asks for.
    """

    specs: dict[str, QuantSpec]
    kept: dict[str, str]
    asked: set[str] = field(default_factory=set)


def select_layers(
    model: nn.Module, quantization: QuantizationConfig
) -> QuantizationPlan:
    """Choose a grid for every layer that can be quantized.

    The recipe's patterns come first; then what the model's own `quant_predicate` asks
    for, which may be other bits or none; then the default. A layer whose width no
    group divides is kept.

    Raises:
        UserError: nothing is left to quantize, or a pattern matches no layer.
    """
    modules = dict(model.named_modules())
    layers = {p: m for p, m in modules.items() if hasattr(m, "to_quantized")}
    named = _named(layers, quantization)
    heads = _heads(modules)
    predicate = getattr(model, "quant_predicate", None) or (lambda *_: True)
    specs, kept, asked = {}, {}, set(named)
    for path, module in layers.items():
        answer = True if path in named else predicate(path, module)
        wanted = named.get(path) or _asked(answer, quantization)
        if path in named:
            reason = "the recipe says so" if named[path] is None else None
        elif isinstance(module, nn.Embedding) and not quantization.quantize_embeddings:
            reason = "embeddings are kept by choice"
        elif path in heads and not quantization.quantize_lm_head:
            reason = "the head is kept by choice"
        else:
            reason = "the model asks to keep it" if wanted is None else None
        if reason is None and not wanted.fits(width := module.weight.shape[-1]):
            reason = f"its width {width} is no multiple of {wanted.group_size}"
        if reason:
            kept[path] = reason
            continue
        specs[path] = wanted
        if isinstance(answer, dict):
            asked.add(path)
    if not specs:
        reasons = "; ".join(sorted(set(kept.values()))) or "it has no linear layer"
        raise UserError(f"nothing of this model can be quantized: {reasons}")
    return QuantizationPlan(specs, kept, asked & specs.keys())


def _named(
    layers: dict[str, nn.Module], quantization: QuantizationConfig
) -> dict[str, QuantSpec | None]:
    """Grids of the layers that a pattern of the recipe means; None = keep.

    Raises:
        UserError: a pattern matches no layer.
    """
    inside = {path: BLOCK.sub("", path) for path in layers}
    found: dict[str, QuantSpec | None] = {}
    for pattern, choice in quantization.overrides.items():
        means = [
            path
            for path, key in inside.items()
            if fnmatchcase(path, pattern) or fnmatchcase(key, pattern)
        ]
        if not means:
            raise UserError(
                f"no layer of this model matches {pattern!r}",
                hint="there are: " + ", ".join(sorted(set(inside.values()))),
            )
        grid = None if choice == SKIP else choice.resolve(quantization)
        found |= {path: grid for path in means if path not in found}
    return found


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
