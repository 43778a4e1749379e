"""The model and the quantized layers that a train stage begins with."""

from dataclasses import dataclass

import mlx.core as mx

from ...config.qat import CONTINUES_FROM_ALL_CODES, CONTINUES_FROM_CODES, QATConfig
from ...config.quant_spec import QuantSpec
from ...config.train import TrainConfig
from ...errors import UserError
from ...models.loader import LoadedModel
from ...models.quantized_layers import has_quantized_inputs
from ...quantization.packing import PackedLayers, dequantized_model, layer_specs
from ...quantization.qat.quantizers import make_quantizer
from ...quantization.target_layers import QuantizationPlan, select_layers
from ...run.logger import RunLogger


@dataclass(frozen=True)
class QATModel:
    """A model to train.

    Attributes:
        loaded: its layers are not quantized.
        selection: the layers that have a fake quantizer.
        qat: how they are quantized; None = not at all.
        packed: the codes that training begins with; None if the model has none.
    """

    loaded: LoadedModel
    selection: QuantizationPlan
    qat: QATConfig | None = None
    packed: PackedLayers | None = None


def prepare(
    config: TrainConfig,
    loaded: LoadedModel,
    logger: RunLogger,
    *,
    seed: int = 0,
    quantized_here: bool = False,
) -> QATModel:
    """Select the layers to quantize. A quantized model continues from its codes.

    Latent weights then begin at random places inside the rounding intervals of their
    codes. The weights before quantization are no better places: many lie outside the
    intervals, because the method may have chosen another code than the nearest.

    Args:
        seed: of the random places.
        quantized_here: by an earlier stage, whose block was compared with `qat` before
            the run. Its mixed precision may have left no layer on the grid of `qat`.

    Raises:
        UserError: the training would quantize a quantized model again, or there are no
            codes to fix.
    """
    qat, place = config.qat, str(loaded.path)
    if has_quantized_inputs(loaded.model) and not (qat and qat.quantize_activations):
        raise UserError(
            "this model quantizes its activations, and the trained model would not",
            place=place,
            hint="add quantize_activations: true to `qat`",
        )
    if "quantization" in loaded.config:
        if qat:
            return _from_codes(config, loaded, logger, seed, quantized_here)
        if not config.adapter:
            raise UserError(
                "this model is quantized, and full fine-tuning needs its weights",
                place=place,
                hint="train an adapter, or add qat: with quantizer: lsq",
            )
        logger.info(
            "the model is quantized: the adapter is fused into its dequantized "
            "weights, because quantizing again would lose part of the improvement"
        )
        return QATModel(loaded, QuantizationPlan({}, {}))
    if qat is None:
        return QATModel(loaded, QuantizationPlan({}, {}))
    if qat.quantizer == "fixed_codes":
        raise UserError(
            "fixed_codes trains a quantized model, and this model is not quantized",
            place=place,
            hint="add a quantize stage before, or use quantizer: lsq",
        )
    return QATModel(loaded, select_layers(loaded.model, qat), qat)


def require_steps(qat: QATConfig | None, steps: int) -> None:
    """Raise UserError if fake quantization begins after the steps."""
    if qat and qat.fake_quant_after_n_steps >= steps:
        raise UserError(
            f"fake quantization begins after {qat.fake_quant_after_n_steps} steps, and "
            f"there are {steps}",
            hint="lower fake_quant_after_n_steps, or train longer",
        )


def _from_codes(
    config: TrainConfig,
    loaded: LoadedModel,
    logger: RunLogger,
    seed: int,
    quantized_here: bool,
) -> QATModel:
    qat = config.qat.for_quantized_model(adapts=config.adapter is not None)
    specs = layer_specs(loaded.model)
    _require_same_specs(qat, specs, loaded, quantized_here)
    selection = QuantizationPlan(
        specs,
        {
            path: "it is not quantized in the model that is trained"
            for path, module in loaded.model.named_modules()
            if hasattr(module, "to_quantized")
        },
        quantize_activations=qat.quantize_activations,
    )
    dequantized, packed = dequantized_model(loaded, mx.float32)
    text = f"training continues from the codes of {len(packed)} layers"
    if qat.quantizer == "fixed_codes":
        text += ", which stay: scales and biases are trained"
    logger.info(text)
    key, modules = mx.random.key(seed), dict(dequantized.model.named_modules())
    for path, codes in packed.items():
        if qat.quantizer == "fixed_codes":
            if not qat.learned_per_group(specs[path]):
                modules[path].freeze(recurse=False, keys=["weight"])
            continue
        # Inside the same codes.
        key, layer_key = mx.random.split(key)
        quantizer = make_quantizer(qat, specs[path], dequantized.dtype)
        weight = quantizer.latent_within_cell(codes, layer_key)
        mx.eval(weight)
        modules[path].weight = weight
    return QATModel(dequantized, selection, qat, packed)


def _require_same_specs(
    qat: QATConfig,
    specs: dict[str, QuantSpec],
    loaded: LoadedModel,
    quantized_here: bool,
) -> None:
    place = str(loaded.path)
    if qat.quantizer not in CONTINUES_FROM_CODES or qat.fake_quant_after_n_steps:
        raise UserError(
            "this model is quantized, and training would quantize it again",
            place=place,
            hint=f"the quantizers {', '.join(CONTINUES_FROM_ALL_CODES)} continue from "
            "its codes, without fake_quant_after_n_steps; or start from the "
            "unquantized model",
        )
    compared = QuantSpec.model_fields.keys() - qat.absent_grid
    by_name = {_describe(spec): spec for spec in specs.values()}
    names = ", ".join(by_name)
    if qat.quantize_activations and not has_quantized_inputs(loaded.model):
        raise UserError(
            "this model does not quantize its activations, and the recipe does",
            place=place,
            hint="remove quantize_activations, or start from the unquantized model",
        )
    is_on_grid = any(
        all(getattr(spec, key) == getattr(qat, key) for key in compared)
        for spec in by_name.values()
    )
    if not is_on_grid and not quantized_here:
        raise UserError(
            f"the model is quantized to {names}; the recipe has {_describe(qat)}",
            place=place,
            hint="use the same values: training continues from the codes",
        )


def _describe(spec: QuantSpec) -> str:
    scale = ", global_scale" if spec.global_scale else ""
    return f"{spec.bits} bits in groups of {spec.group_size} ({spec.mode}{scale})"
