"""All quantization methods, and the block of a recipe that names one."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from .base import ConfigModel
from .quant_spec import Bits, QuantizationConfig

DAMPENING_FRAC = 0.01


class CalibrationConfig(ConfigModel):
    """The tokens a method watches the layers on."""

    dataset: str | None = None
    """A file, folder, Hub id or builtin:<name>; absent = the recipe's training rows, or
    builtin:stdlib where it has none."""
    num_tokens: int | None = Field(None, ge=1)
    """How many; absent = 8 times the width of the widest layer, at least 32768."""
    max_seq_length: int = Field(512, ge=8)
    """Tokens of a window."""
    loss_on: Literal["all", "completions"] = "all"
    """everything = documents are joined and cut, and every token counts; answers = rows
    are watched one by one, as training sees them, and what it trains on counts (see
    data.loss_on): for a model of one task. With rtn and gptq, the latter without
    block_reconstruction and mixed_precision."""
    num_eval_tokens: int = Field(16384, ge=8)
    """Tokens to judge by, of the recipe's validation rows, else of the source."""


class ScaleTuningConfig(ConfigModel):
    """Train scales and biases, codes as they are, to predict what the model predicted.

    A run of Adam towards the unquantized model's predictions, which are on disk; what
    is best on tokens held out is kept, be it the start.
    """

    steps: int = Field(100, ge=1)
    """Optimizer steps."""
    batch_tokens: int = Field(4096, ge=8)
    """Tokens of a step, in windows of `calibration.length`; at most 1,024 of them, or
    one window, go through the model at once."""
    learning_rate: float | None = Field(None, gt=0)
    """Of a scale, as a share of its layer's mean; absent = found by a short probe."""
    top_k: int = Field(256, ge=1)
    """Likeliest tokens kept of every prediction; all others count as one."""
    temperature: float = Field(1.0, gt=0)
    """What logits are divided by in training; above 1, unlikely tokens count more."""


def _switched(value):
    """`tune: false` is off, and `tune: true` all defaults."""
    return {True: {}, False: None}[value] if isinstance(value, bool) else value


ScaleTuning = Annotated[ScaleTuningConfig | None, BeforeValidator(_switched)]


class MixedPrecisionConfig(ConfigModel):
    """What the model may weigh; every layer's grid is chosen for it by measurement."""

    target_bpw: float | None = Field(None, gt=0)
    """All bytes of the checkpoint's tensors times 8, by the weights of the model, as
    report.json counts them; or give bytes."""
    target_bytes: float | None = Field(None, gt=0)
    """Bytes of all tensors of the checkpoint; or give bits_per_weight."""
    candidate_bits: list[Bits] = Field([2, 3, 4, 5, 6, 8], min_length=1)
    """Bits that a layer may get."""
    candidate_group_sizes: list[Literal[32, 64, 128]] = Field(
        [32, 64, 128], min_length=1
    )
    """Group sizes that a layer may get."""

    @model_validator(mode="after")
    def _one_measure(self):
        if (self.target_bpw is None) == (self.target_bytes is None):
            raise ValueError("give either target_bpw or target_bytes")
        return self

    def limit(self, weights: int) -> int:
        """Bytes that a model of so many weights may have."""
        return int(self.target_bytes or self.target_bpw * weights / 8)


class PTQConfig(QuantizationConfig):
    """What all methods have that quantize a finished model."""

    calibration: CalibrationConfig = CalibrationConfig()
    """Tokens that the model is watched on, and its scales tuned on."""
    scale_tuning: ScaleTuning = None
    """Tune scales and biases; false = off, {} = on, as it is by default after gptq."""
    rollback_if_worse: bool = True
    """Undo a step that is no better on held-out tokens; false = do not compare, as for
    a model too large to be run twice."""
    mixed_precision: MixedPrecisionConfig | None = None
    """Present = grids by layer that lose least within it; the block's own bits and
    group size are for what it leaves open. Layers named in `layers`, and those that the
    model itself asks a grid for, keep theirs."""

    @model_validator(mode="after")
    def _budget_is_affine(self):
        if self.mixed_precision and self.mode != "affine":
            raise ValueError(f"a budget chooses affine grids; the mode is {self.mode}")
        return self

    @model_validator(mode="after")
    def _counts_answers(self):
        alike = " and ".join(self.ignores_token_weights)
        if self.calibration.loss_on == "completions" and alike:
            raise ValueError(
                f"{alike} takes all tokens alike: leave calibration.loss_on out"
            )
        return self

    @property
    def ignores_token_weights(self) -> list[str]:
        """What of it does not tell tokens that count from others."""
        return ["mixed_precision"] if self.mixed_precision else []


class BlockReconstructionConfig(ConfigModel):
    """Train every block's weights and grids towards its full-precision output."""

    steps: int = Field(100, ge=1)
    """Optimizer steps for every block, on about 2048 tokens each."""
    learning_rate: float = Field(0.003, gt=0)
    """Of a weight, in steps of its grid."""
    scale_lr_multiplier: float = Field(3.0, gt=0)
    """Learning rate of scales and biases as a multiple of the weights'."""


class AWQConfig(PTQConfig):
    """Fold scales, clip ranges, and round to the nearest."""

    method: Literal["awq"] = "awq"
    """The method's name."""

    @model_validator(mode="after")
    def _affine(self):
        if self.mode != "affine":
            raise ValueError(f"awq is for affine grids; {self.mode} is rounded by rtn")
        return self

    @property
    def ignores_token_weights(self) -> list[str]:
        """The method as a whole."""
        return ["awq"]


class RTNConfig(PTQConfig):
    """Round every weight to the nearest point of its group's grid."""

    method: Literal["rtn"] = "rtn"
    """The method's name."""

    @model_validator(mode="after")
    def _scaled(self):
        if self.scale_tuning and self.mode != "affine":
            raise ValueError(
                f"{self.mode} has no scales to tune; leave `scale_tuning` out"
            )
        return self


class GPTQConfig(PTQConfig):
    """Fit codes and grids to what the layers see on calibration tokens."""

    method: Literal["gptq"] = "gptq"
    """The method's name."""
    scale_tuning: ScaleTuning = ScaleTuningConfig()
    """Tune scales and biases afterwards; false = off."""
    refine_iters: int = Field(3, ge=0)
    """Rounds of refit and coordinate descent after GPTQ itself."""
    asymmetric_calibration: bool = True
    """Layers make up for the errors of those before them, and for what the residual
    stream they add to has lost, as far as the half of the tokens says of the others."""
    output_hessian: bool = True
    """Rows make up for each other's errors, by how the loss answers to what comes out:
    before it all begins, tokens go through the model and the slopes of their loss back.
    """
    dampening_frac: float = Field(DAMPENING_FRAC, gt=0, le=1)
    """Share of the mean of a Hessian's diagonal that is added to it, to begin with."""

    block_reconstruction: BlockReconstructionConfig | None = None
    """Train every block's weights and grids afterwards, {} = with all defaults; what is
    no better on windows held out is undone. Off: at 2 bits data/tiny-base came out but
    2% nearer to itself, in several times the time."""

    @model_validator(mode="after")
    def _affine(self):
        if self.mode != "affine":
            raise ValueError(f"gptq is for affine grids; {self.mode} is rounded by rtn")
        return self

    @property
    def ignores_token_weights(self) -> list[str]:
        """What of it does not tell tokens that count from others."""
        own = ["block_reconstruction"] if self.block_reconstruction else []
        return own + super().ignores_token_weights


def _with_method(value):
    """A quantize block that names no method rounds to nearest."""
    return {"method": "rtn", **value} if isinstance(value, dict) else value


QuantizeConfig = Annotated[
    Annotated[RTNConfig | GPTQConfig | AWQConfig, Field(discriminator="method")],
    BeforeValidator(_with_method),
]
