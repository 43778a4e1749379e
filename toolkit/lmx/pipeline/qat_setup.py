"""The layers that a train stage rounds: chosen, or those of a model in codes."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from ..config.qat import CONTINUES_FROM_CODES, QATConfig
from ..config.quant_spec import QuantSpec
from ..config.train import TrainConfig
from ..errors import UserError
from ..models.loader import LoadedModel
from ..quantization.dequantize import (
    PackedLayers,
    dequantized_model,
    layer_specs,
    packed_layers,
)
from ..quantization.qat.quantizers import QUANTIZERS
from ..quantization.target_layers import QuantizationPlan, select_layers
from ..run.logger import RunLogger


@dataclass(frozen=True)
class QATModel:
    """A model to train.

    Attributes:
        loaded: its layers are dense, but where only adapters of codes are trained.
        rounding: how they are rounded; None = not at all.
        packed: the codes its rounded layers begin with; None of a model without.
    """

    loaded: LoadedModel
    selection: QuantizationPlan
    rounding: QATConfig | None = None
    packed: PackedLayers | None = None


def prepare(
    config: TrainConfig,
    loaded: LoadedModel,
    logger: RunLogger,
    *,
    origin: Callable[[], dict[str, mx.array]] = dict,
    seed: int = 0,
) -> QATModel:
    """Choose the layers to round; of a model in codes go on from these.

    The weights to train then lie in the cells of their codes, each as near to the one
    it was quantized from as its cell lets it be: a method may have left it another code
    than the nearest, and from the dense weights the first step would undo that. At the
    points themselves little is learned: for long no code moves, and then many at once.
    But those that compensate for each other stay longest there, which is best where all
    that is to be learned is what the model has been. Where the dense weights are not
    known, weights are spread over their cells at random.

    Args:
        origin: asked where it matters, for the weights, by name, that a model in codes
            was quantized from, as far as they are known; may be unread, and are taken
            out one by one.
        seed: of the spreading.

    Raises:
        UserError: a quantized model, and training would round it anew.
    """
    rounding = config.qat
    if config.keeps_codes:
        return _in_codes(loaded)
    if "quantization" not in loaded.config:
        if rounding and rounding.latent_init is not None:
            raise UserError(
                "latent_init is for a model in codes, and this one has none",
                place=str(loaded.path),
                hint="leave it out, or quantize first",
            )
        chosen = (
            select_layers(loaded.model, rounding)
            if rounding
            else QuantizationPlan({}, {})
        )
        return QATModel(loaded, chosen, rounding)
    if rounding:
        adapts = config.adapter is not None
        rounding = rounding.for_quantized_model(adapts=adapts)
        found = _from_codes(rounding, loaded, logger)
        at_points = rounding.latent_init == "codes"
        if rounding.latent_init is None:
            at_points = (
                rounding.quantizer == "scales_only" or config.is_self_distillation
            )
        if not at_points:
            _spread(found, origin(), mx.random.key(seed))
        return found
    if not config.adapter:
        raise UserError(
            "this model is already quantized, and full training needs its weights",
            place=str(loaded.path),
            hint="train an adapter, or add quantization: with grid: learned",
        )
    logger.info(
        "the model is quantized: the adapter will be fused into its expanded "
        "weights, for rounding them again would lose part of the gain"
    )
    return QATModel(loaded, QuantizationPlan({}, {}))


def _in_codes(loaded: LoadedModel) -> QATModel:
    """A model whose biases alone will change."""
    specs = layer_specs(loaded.model)
    if not specs:
        raise UserError(
            "a qa_lora adapter is for a model in codes, and this one has none",
            place=str(loaded.path),
            hint="quantize it first, or use type lora",
        )
    return QATModel(
        loaded,
        QuantizationPlan(specs, _kept(loaded)),
        None,
        packed_layers(loaded.model),
    )


def require_time(rounding: QATConfig | None, steps: int) -> None:
    """Raise UserError if the rounding would begin after the last of the steps."""
    if rounding and rounding.phase_starts[-1] >= steps:
        raise UserError(
            f"rounding to {rounding.bits} bits begins after {rounding.phase_starts[-1]} "
            f"steps, and there are {steps}",
            hint="lower fake_quant_after_n_steps or the steps of progressive, or train longer",
        )


def _from_codes(
    rounding: QATConfig, loaded: LoadedModel, logger: RunLogger
) -> QATModel:
    specs = layer_specs(loaded.model)
    _require_same(rounding, specs, loaded)
    kept = _kept(loaded)
    dtype = loaded.dtype if rounding.quantizer == "scales_only" else mx.float32
    dense, packed = dequantized_model(loaded, dtype)
    logger.info(f"training goes on from the codes of {len(packed)} layers")
    return QATModel(dense, QuantizationPlan(specs, kept), rounding, packed)


def _spread(found: QATModel, origin: dict[str, mx.array], key: mx.array) -> None:
    """Move the weights to train from the points of their codes, which stay."""
    modules = dict(found.loaded.model.named_modules())
    kind = QUANTIZERS[found.rounding.quantizer]
    for path, packed in found.packed.items():
        spec, layer = found.selection.specs[path], modules[path]
        width = mx.abs(mx.repeat(packed["scales"], spec.group_size, axis=-1))
        wished, points = origin.pop(f"{path}.weight", None), layer.weight
        if wished is None or not _are_near(wished, points, width):
            key, own = mx.random.split(key)
            noise = mx.random.uniform(-0.5, 0.5, points.shape, key=own)
            wished = points + noise * width
        grid = kind(spec, found.loaded.dtype, found.rounding.scale_init)
        layer.weight = grid.latent_within_cell(packed, wished)
        mx.eval(layer.weight)


def _are_near(weights: mx.array, points: mx.array, width: mx.array) -> bool:
    """Whether points stand for these weights, not for ones that were folded."""
    distance = mx.abs(weights.astype(mx.float32) - points)
    return (distance.mean() <= width.mean()).item()


def _kept(loaded: LoadedModel) -> dict[str, str]:
    return {
        path: "it is not quantized in the model that is trained"
        for path, module in loaded.model.named_modules()
        if hasattr(module, "to_quantized")
    }


def _require_same(
    rounding: QATConfig, specs: dict[str, QuantSpec], loaded: LoadedModel
) -> None:
    place = str(loaded.path)
    if rounding.quantizer not in CONTINUES_FROM_CODES or rounding.phase_starts[-1]:
        raise UserError(
            "this model is already quantized, and training would round it again",
            place=place,
            hint=f"grid: {', '.join(CONTINUES_FROM_CODES)} go on from its codes, without "
            "fake_quant_after_n_steps or progressive; or start from the unquantized model",
        )
    asked = QuantSpec(**rounding.model_dump(include=set(QuantSpec.model_fields)))
    found = {_told(spec): spec for spec in specs.values()}
    if any(spec.mode != "affine" for spec in found.values()):
        raise UserError(f"only affine grids can be trained, not {', '.join(found)}")
    if asked not in found.values():
        raise UserError(
            f"the model is quantized to {', '.join(found)}; the recipe asks for "
            f"{_told(asked)}",
            place=place,
            hint="ask for the same: training goes on from the codes",
        )


def _told(spec: QuantSpec) -> str:
    return f"{spec.bits} bits in groups of {spec.group_size} ({spec.mode})"
