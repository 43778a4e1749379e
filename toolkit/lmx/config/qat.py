"""The `qat` block: fake quantization in training."""

from typing import Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from .quant_spec import FLOAT_MODES, QuantizationConfig, QuantSpec

# Quantizers that can continue from all codes of a quantized model, and from some.
CONTINUES_FROM_ALL_CODES = ("fixed_codes", "lsq", "fixed_scale")
CONTINUES_FROM_CODES = (*CONTINUES_FROM_ALL_CODES, "ternary")
# Quantizers of the floating-point modes.
FLOAT_QUANTIZERS = ("minmax", "fixed_scale")

# Trained parameters per group.
LEARNED = {"lsq": 2, "fixed_codes": 2, "ternary": 1}


class QATConfig(QuantizationConfig):
    """Quantization-aware training: the forward pass uses the exported, dequantized
    weights; gradients pass through the rounding (straight-through estimator). On a
    quantized model, absent bits and group_size are those of its layers."""

    quantizer: (
        Literal["minmax", "lsq", "fixed_codes", "fixed_scale", "ternary"] | None
    ) = None
    """minmax: MLX's scale and bias of the current weights. lsq: trained scales and
    biases (LSQ, arXiv 1902.08153), which learn at a tenth of learning_rate.
    fixed_codes, for a quantized model: scales and biases are trained, and parameters
    that are not quantized, such as norms; codes stay (E2E-QP, arXiv 2407.11062). Scales
    and biases learn at 5 times learning_rate, in mean scales.
    fixed_scale: scales and biases stay as initialized; only codes change. lsq and
    fixed_scale start with the smallest squared rounding error, or continue from a
    quantized model. ternary, with bits: 2, has the weights -s, 0 and s, where s is
    trained for every group (BitNet b1.58, arXiv 2402.17764; ParetoQ, arXiv 2502.02631).
    The modes mxfp4, nvfp4 and mxfp8 have minmax and fixed_scale; those of GGUF have
    minmax. Default: fixed_scale in mxfp4, nvfp4 and mxfp8 (minmax with
    fake_quant_after_n_steps) and for an adapter on a quantized model; fixed_codes for
    another quantized model; else minmax."""
    fake_quant_after_n_steps: int = Field(0, ge=0)
    """Steps in full precision before fake quantization of the trained layers begins.
    Layers that are not trained are quantized from the first step on."""

    def quantizer_for(self, spec: QuantSpec) -> str:
        """The quantizer of a layer.

        A model or an override may ask for other bits in some layers, or for another
        mode. A layer that this quantizer does not fit has another one.
        """
        name = self.quantizer
        if spec.mode in FLOAT_MODES:
            if name in FLOAT_QUANTIZERS:
                return name
            # Fixed scales are those of the weights before the first step.
            return "minmax" if self.fake_quant_after_n_steps else "fixed_scale"
        if spec.mode != "affine":
            return "minmax"
        if name == "ternary" and spec.bits != 2:
            return "minmax"
        return name or "minmax"

    def learned_per_group(self, spec: QuantSpec) -> int:
        """Trained quantizer parameters per group of a layer."""
        return LEARNED.get(self.quantizer_for(spec), 0)

    def is_straight_through(self, spec: QuantSpec) -> bool:
        """Whether a weight of a layer has the gradient of its quantized weight."""
        return self.quantizer_for(spec) == "minmax" or spec.mode in FLOAT_MODES

    def for_quantized_model(self, *, adapts: bool) -> "QATConfig":
        """The config for a quantized base, where the default differs."""
        if self.quantizer or self.fake_quant_after_n_steps:
            return self
        if adapts or self.mode in FLOAT_MODES:
            return self.model_copy(update={"quantizer": "fixed_scale"})
        if self.mode == "affine":
            return self.model_copy(update={"quantizer": "fixed_codes"})
        return self

    @property
    def absent_grid(self) -> set[str]:
        """The keys that a quantized model decides; other modes fix them."""
        grid = {"bits", "group_size"} if self.mode == "affine" else set()
        return grid - self.model_fields_set

    @model_serializer(mode="wrap")
    def _leave_grid_to_model(self, to_dict: SerializerFunctionWrapHandler) -> dict:
        values = to_dict(self)
        return {k: v for k, v in values.items() if k not in self.absent_grid}

    @model_validator(mode="after")
    def _check_keys_fit_quantizer(self):
        quantizer = self.quantizer or self.quantizer_for(self)
        names = FLOAT_QUANTIZERS if self.mode in FLOAT_MODES else ("minmax",)
        if self.mode != "affine" and quantizer not in names:
            raise ValueError(
                f"{self.mode} has no trainable scales: use quantizer: "
                + " or ".join(names)
            )
        if quantizer == "ternary" and self.bits != 2:
            raise ValueError("ternary weights have 2-bit codes: use bits: 2")
        if self.fake_quant_after_n_steps and quantizer == "fixed_scale":
            raise ValueError(
                "quantizer: fixed_scale sets its scales before the first step: remove "
                "fake_quant_after_n_steps"
            )
        return self
