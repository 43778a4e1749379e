"""Select the layers of a model to quantize, and the grid of each."""

import inspect
import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import mlx.nn as nn

from ..config.quant_spec import ACTIVATION_MODES, SKIP, QuantizationConfig, QuantSpec
from ..errors import UserError

# The part of a layer's path before its path in the block.
BLOCK_PREFIX = re.compile(r"^.*?\.\d+\.")
# The class of a mixture's linear layers, by name: only the loader may import mlx-lm.
EXPERTS = "SwitchLinear"
SKIP_HINT = "use skip for this layer, or a mode that quantizes activations"


@dataclass(frozen=True)
class QuantizationPlan:
    """Which layers of a model are quantized.

    Attributes:
        specs: grid by path of each layer to quantize.
        skipped: reason by path of each layer left unquantized.
        explicit: paths whose grid comes from a recipe pattern or from the model.
        quantize_activations: whether the inputs of linear layers are quantized too.
    """

    specs: dict[str, QuantSpec]
    skipped: dict[str, str]
    explicit: set[str] = field(default_factory=set)
    quantize_activations: bool = False


def select_layers(
    model: nn.Module, quantization: QuantizationConfig
) -> QuantizationPlan:
    """Choose a grid for every layer that can be quantized.

    Recipe patterns come first, then the model's own `quant_predicate`, then the
    default. A layer is skipped if its width is not a multiple of the group size. K
    blocks of GGUF give way to small blocks in layers that are too narrow for them.

    Raises:
        UserError: no layer can be quantized, a pattern matches no layer, the inputs of
            a layer with an override cannot be quantized, or no layer has a place for a
            global scale.
    """
    modules = dict(model.named_modules())
    layers = {p: m for p, m in modules.items() if hasattr(m, "to_quantized")}
    overrides = _resolve_overrides(layers, quantization)
    predicate = getattr(model, "quant_predicate", None) or (lambda *_: True)
    specs, skipped, explicit = {}, {}, set(overrides)
    for path, module in layers.items():
        answer = True if path in overrides else predicate(path, module)
        spec = overrides.get(path) or _predicate_spec(answer, quantization)
        if path in overrides:
            reason = "skipped by the recipe" if overrides[path] is None else None
        else:
            reason = "skipped by the model's predicate" if spec is None else None
        if reason is None:
            spec = spec.for_width(width := module.weight.shape[-1])
            if spec.global_scale and not takes_global_scale(module):
                spec = spec.model_copy(update={"global_scale": False})
            if not spec.fits(width):
                reason = f"its width {width} is not a multiple of {spec.group_size}"
        if reason is None and quantization.quantize_activations:
            reason = _no_input_quantization(module, spec)
            if reason and overrides.get(path):
                raise UserError(f"{path} has an override, but {reason}", hint=SKIP_HINT)
        if reason:
            skipped[path] = reason
            continue
        specs[path] = spec
        if isinstance(answer, dict):
            explicit.add(path)
    if not specs:
        reasons = "; ".join(sorted(set(skipped.values()))) or "it has no linear layer"
        raise UserError(f"no layer of this model can be quantized: {reasons}")
    grids = quantization, *quantization.overrides.values()
    wanted = any(getattr(grid, "global_scale", None) for grid in grids)
    if wanted and not any(spec.global_scale for spec in specs.values()):
        raise UserError(
            "global_scale is for the experts of a mixture, and no layer that is "
            "quantized to nvfp4 has any",
            hint="remove global_scale",
        )
    return QuantizationPlan(
        specs, skipped, explicit & specs.keys(), quantization.quantize_activations
    )


def has_known_inputs(module: nn.Module) -> bool:
    """Whether a layer multiplies its inputs by one matrix, or by one for each expert.

    mlx-lm's layers of latent attention have one for each head, which they use
    transposed for some lengths of the input: the cost of their errors is unknown.
    """
    return module.weight.ndim == 2 or type(module).__name__ == EXPERTS


def takes_global_scale(module: nn.Module) -> bool:
    """Whether mlx-lm's quantized layer for this one has a `global_scale`."""
    return "global_scale" in inspect.signature(module.to_quantized).parameters


def _no_input_quantization(module: nn.Module, spec: QuantSpec) -> str | None:
    """Why the inputs of a layer cannot be quantized; None if they can be, or stay.

    mlx-lm quantizes the inputs of all quantized linear layers of a model, or of none.
    """
    if not isinstance(module, nn.Linear):
        return None
    if "bias" in module:
        return "with quantize_activations, a layer with a bias cannot be quantized"
    if spec.mode not in ACTIVATION_MODES:
        return f"with quantize_activations, mode {spec.mode} cannot be used"
    return None


def _resolve_overrides(
    layers: dict[str, nn.Module], quantization: QuantizationConfig
) -> dict[str, QuantSpec | None]:
    """Grids of the layers that a recipe pattern matches. None = skip.

    Raises:
        UserError: a pattern matches no layer.
    """
    block_paths = {path: BLOCK_PREFIX.sub("", path) for path in layers}
    specs: dict[str, QuantSpec | None] = {}
    for pattern, choice in quantization.overrides.items():
        matches = [
            path
            for path, block_path in block_paths.items()
            if fnmatchcase(path, pattern) or fnmatchcase(block_path, pattern)
        ]
        if not matches:
            raise UserError(
                f"no layer of this model matches {pattern!r}",
                hint="layers: " + ", ".join(sorted(set(block_paths.values()))),
            )
        spec = None if choice == SKIP else choice.resolve(quantization)
        specs |= {path: spec for path in matches if path not in specs}
    return specs


def _predicate_spec(answer: bool | dict, default: QuantSpec) -> QuantSpec | None:
    """The grid that a model's predicate returns: none, the default, or its own.

    As in mlx-lm, a grid without a mode is affine. The default fills in missing fields
    if the modes are equal.
    """
    if not answer:
        return None
    fields = QuantSpec.model_fields
    values = default.model_dump(include=set(fields))
    if isinstance(answer, dict):
        given = {"mode": "affine"} | {k: v for k, v in answer.items() if k in fields}
        values = (values if given["mode"] == default.mode else {}) | given
    return QuantSpec(**values)
