"""The `quantize` block: calibration, refinement and the methods rtn, gptq and awq."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from .base import ConfigModel
from .data import DataSources
from .quant_spec import Bits, KVCacheBits, QuantizationConfig

SMOOTHING_STRENGTH = 0.5
# In a JSON Schema, of the methods that are not the default: see `QuantizeConfig`.
METHOD_IS_REQUIRED: dict[str, Any] = {"required": ["method"]}


class CalibrationConfig(ConfigModel):
    """The calibration data: tokens on which activations are captured."""

    dataset: DataSources = Field(
        [], examples=["builtin:stdlib", ["chats.jsonl", "builtin:stdlib"]]
    )
    """A file, folder, Hub id or `builtin:<name>`, or a list of them. Default: the
    recipe's training data, or builtin:stdlib if it has none."""
    num_tokens: int | None = Field(None, ge=1)
    """Calibration tokens, in equal parts from all datasets. Default: 8 times the width
    of the widest layer, at least 32768."""
    max_seq_length: int = Field(512, ge=8)
    """Tokens per calibration sequence."""
    loss_on: Literal["all", "completions"] = "all"
    """Tokens that count. all: documents are concatenated and split, and every token
    counts. completions: examples are processed one by one as in training, and the
    tokens with a loss count (see data.loss_on); use it for a model of one task.
    completions works with rtn, and with gptq without mixed_precision."""
    num_eval_tokens: int = Field(4096, ge=8)
    """Held-out tokens for comparing candidates, from the recipe's validation data, else
    from the calibration data."""


class MixedPrecisionConfig(ConfigModel):
    """Bits and group size of every layer, chosen by measured loss for a target size."""

    target_bpw: float = Field(gt=0, examples=[3.5])
    """Target bits per weight: bytes of all tensors in the checkpoint times 8, divided
    by the weights of the model, as in report.json."""
    candidate_bits: list[Bits] = Field([2, 3, 4, 5, 6, 8], min_length=1)
    """Bits to choose from."""
    candidate_group_sizes: list[Literal[32, 64, 128]] = Field(
        [32, 64, 128], min_length=1
    )
    """Group sizes to choose from."""

    def max_bytes(self, num_weights: int) -> int:
        """Maximum bytes of a checkpoint with `num_weights` weights."""
        return int(self.target_bpw * num_weights / 8)


class KVCacheConfig(ConfigModel):
    """Bits of the KV cache of every layer, chosen by measured loss for an average.

    The weights are those of the quantized model. config.json of the result names the
    bits, and `lmx generate` uses them. See docs/quantization.md.
    """

    average_bits: float = Field(gt=0, examples=[5])
    """Mean bits per number in the cache, scales included: with 16-bit models, 4 bits
    take 4.5, and 4.25 where the head dimension is a multiple of 128."""
    candidate_bits: list[KVCacheBits] = Field([4, 8, 16], min_length=1)
    """Bits to choose from. 16 = the dtype of the model."""

    @model_validator(mode="after")
    def _check_average(self):
        if self.average_bits <= min(self.candidate_bits):
            raise ValueError(
                f"average_bits is {self.average_bits:g}, and scales take a part; the "
                f"smallest of candidate_bits is {min(self.candidate_bits)}"
            )
        return self


class PTQConfig(QuantizationConfig):
    """Keys of all post-training quantization methods."""

    calibration: CalibrationConfig = CalibrationConfig()
    """Calibration data, also for mixed_precision."""
    rollback_if_worse: bool = True
    """Keep the result of each quantization step only if it lowers the KL divergence on
    held-out tokens. false = skip this check, e.g. when the model is too large to run
    twice."""
    mixed_precision: MixedPrecisionConfig | None = None
    """Present = choose bits and group size per layer. Layers named in `overrides`, and
    layers for which the model requests a spec, keep theirs. The block's own bits and
    group_size apply where there is no choice."""
    smoothing_strength: float | None = Field(None, ge=0, le=1, examples=[0.5])
    """With quantize_activations: move the range of large activations into the weights
    before both are quantized (SmoothQuant, arXiv 2211.10438); the exponent alpha. 0 =
    off. Default: 0.5 with nvfp4, where the model has places for it, else 0."""
    kv_cache: KVCacheConfig | None = None
    """Present = choose the bits of the KV cache by layer, after the weights."""

    @model_validator(mode="after")
    def _check_methods(self):
        if self.mixed_precision and self.mode != "affine":
            raise ValueError(
                f"mixed_precision needs mode: affine; the mode is {self.mode}"
            )
        if self.smoothing_strength and not self.quantize_activations:
            raise ValueError(
                "smoothing_strength needs quantize_activations: true; it has no use "
                "where inputs are not quantized"
            )
        if self.calibration.loss_on == "completions" and self.mixed_precision:
            raise ValueError(
                "mixed_precision weights all tokens equally: remove calibration.loss_on"
            )
        return self

    @property
    def compares_with_rtn(self) -> bool:
        """Whether RTN replaces the result of the method if it is better."""
        is_rtn = self.method == "rtn" and not self.smoothing
        return self.rollback_if_worse and not is_rtn

    @property
    def smoothing(self) -> float:
        """`smoothing_strength` with its default; 0 = off."""
        if self.smoothing_strength is not None:
            return self.smoothing_strength
        is_w4a4 = self.mode == "nvfp4" and self.quantize_activations
        return SMOOTHING_STRENGTH if is_w4a4 else 0.0


class RTNConfig(PTQConfig):
    """Round-to-nearest: every weight gets the nearest level of its group."""

    method: Literal["rtn"] = "rtn"
    """Quantization method."""


# Values of the other keys by effort, where they differ from the defaults.
EFFORTS: dict[str, dict[str, Any]] = {
    "fast": {
        "refine_iters": 0,
        "output_hessian": False,
        "rollback_if_worse": False,
    },
    "standard": {},
}


class GPTQConfig(PTQConfig, json_schema_extra=METHOD_IS_REQUIRED):
    """Codes, scales and biases that minimize the output error of every layer on the
    calibration data (GPTQ, arXiv 2210.17323). All modes."""

    method: Literal["gptq"] = "gptq"
    """Quantization method."""
    effort: Literal["fast", "standard"] = "standard"
    """Time to spend; it sets the keys that the recipe does not name. fast: one pass of
    GPTQ, with refine_iters 0, output_hessian false and rollback_if_worse false, in half
    of the time. standard: the defaults."""
    dampening_frac: float = Field(0.1, gt=0, le=1)
    """Initial Hessian dampening, as a fraction of the mean of its diagonal."""
    refine_iters: int = Field(1, ge=0)
    """Iterations of scale refit and coordinate descent after GPTQ. Floating-point
    modes: of a new choice of every group's scale and codes."""
    asymmetric_calibration: bool = True
    """Each layer compensates for the quantization error of earlier layers, both in its
    inputs and in the residual stream it writes to (GPTAQ, arXiv 2504.02692). The
    correction is fitted on one half of the tokens and scaled on the other half."""
    output_hessian: bool = True
    """Use the Hessian of the loss with respect to layer outputs, so that output
    channels can compensate for each other's errors. Needs one extra forward and
    backward pass."""

    @model_validator(mode="before")
    @classmethod
    def _set_effort(cls, value):
        if isinstance(value, dict) and isinstance(value.get("effort"), str):
            return EFFORTS.get(value["effort"], {}) | value
        return value


class AWQConfig(PTQConfig, json_schema_extra=METHOD_IS_REQUIRED):
    """Channels with large inputs are scaled up before the weights are rounded, and
    down in the layer before; then the range of each group is clipped (AWQ, arXiv
    2306.00978). Both by the error of outputs on the calibration data. All modes."""

    method: Literal["awq"] = "awq"
    """Quantization method."""
    rounding: Literal["rtn", "gptq"] = "rtn"
    """How the scaled weights are rounded. rtn: to nearest, in clipped ranges. gptq: by
    GPTQ as with `effort: fast`, which fits the ranges itself."""

    @property
    def as_gptq(self) -> GPTQConfig:
        """The rounding as GPTQ's settings; clipping needs no full-precision stream."""
        keys = self.model_dump(include=PTQConfig.model_fields.keys())
        compares = self.rounding == "gptq"
        return GPTQConfig(**keys, effort="fast", asymmetric_calibration=compares)


QuantizeConfig = Annotated[
    Annotated[RTNConfig | GPTQConfig | AWQConfig, Field(discriminator="method")],
    BeforeValidator(lambda v: {"method": "rtn", **v} if isinstance(v, dict) else v),
]
