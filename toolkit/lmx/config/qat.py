"""What a recipe says of rounding in training: the grid, and how it is learned."""

from itertools import accumulate
from typing import Literal

from pydantic import Field, model_validator

from .base import ConfigModel
from .quant_spec import Bits, QuantizationConfig

# Grids of three or four levels around zero.
SYMMETRIC_QUANTIZERS = ("seq", "ternary")
# Grids that can go on from the codes of a quantized model.
CONTINUES_FROM_CODES = ("lsq", "scales_only", "fixed_scale")
# Grids that learn the same of every width.
ANY_WIDTH_QUANTIZERS = ("minmax", "lsq")


class BitScheduleStep(ConfigModel):
    """Steps of a training that have another width."""

    bits: Bits
    """Bits per code."""
    steps: int = Field(ge=1)
    """Optimizer steps with them."""


class QATConfig(QuantizationConfig):
    """A grid to train with, rounded as the export rounds; gradients pass through."""

    quantizer: Literal[
        "minmax", "lsq", "scales_only", "fixed_scale", "seq", "ternary"
    ] = "minmax"
    """minmax = every step MLX's own grid of the weights; kept = scales and biases stay
    and the weights move between their points, also after a quantize stage, where an
    adapter has this grid unless it asks for another; learned = scales and biases
    are trained with the weights (LSQ, arXiv 1902.08153), also after a quantize stage;
    frozen = codes stay and only scales and biases are trained (arXiv 2407.11062), also
    after a quantize stage; at 2 bits balanced = learned levels of -3, -1, 1, 3
    (arXiv 2502.02631) and ternary = of -1, 0, 1."""
    scale_init: Literal["minmax", "mse"] = "mse"
    """Where scales and biases begin: at the range of the weights, or where rounding
    loses least; after a quantize stage they begin as stored."""
    latent_init: Literal["codes", "nearest"] | None = None
    """After a quantize stage: whether weights begin at the points that their codes
    stand for, and none has another code before it moved half a step, or in the cells
    about these, as near to what was quantized as each lets them; then codes move from
    the first step on, which learns more and loses more at first. Absent = true where a
    teacher is all there is to learn from, and is the model before it was quantized."""
    scale_lr_multiplier: float = Field(0.1, gt=0)
    """Learning rate of scales and biases as a multiple of the weights'; with a frozen
    grid of learning_rate."""
    fake_quant_after_n_steps: int = Field(0, ge=0)
    """Steps in full precision before the rounding begins; layers that are not trained
    are rounded from the first step on."""
    bit_schedule: list[BitScheduleStep] = Field([])
    """Wider grids to come down by, as `[{bits: 8, steps: 50}, {bits: 4, steps: 50}]`:
    one after the other from fake_quant_after_n_steps on, each narrower than the one before it, and
    after them `bits`, which is what is exported; learned grids begin anew with each. A
    layer of more bits than a phase has keeps them."""

    @property
    def phase_starts(self) -> list[int]:
        """The steps with which the phases begin, that of `bits` last."""
        lasting = [
            self.fake_quant_after_n_steps,
            *(phase.steps for phase in self.bit_schedule),
        ]
        return [*accumulate(lasting)]

    @property
    def learned_per_group(self) -> int:
        """Numbers that are learned of a group's grid."""
        if self.quantizer in ("minmax", "fixed_scale"):
            return 0
        return 1 if self.quantizer in SYMMETRIC_QUANTIZERS else 2

    def for_quantized_model(self, *, adapts: bool) -> "QATConfig":
        """The same of a model in codes; an adapter of it keeps the grid it has."""
        keeps = (
            adapts and self.quantizer == "minmax" and not self.fake_quant_after_n_steps
        )
        return self.model_copy(update={"quantizer": "fixed_scale"}) if keeps else self

    @model_validator(mode="after")
    def _consistent(self):
        if self.quantizer != "minmax" and self.mode != "affine":
            raise ValueError(
                f"{self.mode} has no scales to learn: use quantizer: minmax"
            )
        if self.quantizer in SYMMETRIC_QUANTIZERS and self.bits != 2:
            raise ValueError(f"a {self.quantizer} grid has 2 bits: set bits: 2")
        if self.quantizer == "minmax" and (
            self.scale_init,
            self.scale_lr_multiplier,
        ) != ("mse", 0.1):
            raise ValueError(
                "scale_init and scale_lr_multiplier are for grids that are learned"
            )
        if self.quantizer == "fixed_scale" and self.scale_lr_multiplier != 0.1:
            raise ValueError(
                "scale_lr_multiplier is for scales and biases; a kept grid's stay"
            )
        if self.latent_init is not None and self.quantizer not in (
            *ANY_WIDTH_QUANTIZERS,
            "fixed_scale",
        ):
            raise ValueError("latent_init is for weights that go on from codes")
        if self.quantizer == "scales_only" and self.fake_quant_after_n_steps:
            raise ValueError(
                "fake_quant_after_n_steps is for weights; a scales_only quantizer has only codes"
            )
        if self.quantizer == "fixed_scale" and self.fake_quant_after_n_steps:
            raise ValueError(
                "a kept grid is that of the beginning: leave fake_quant_after_n_steps out"
            )
        if self.bit_schedule:
            self._can_come_down()
        return self

    def _can_come_down(self):
        if self.quantizer not in ANY_WIDTH_QUANTIZERS or self.mode != "affine":
            raise ValueError(
                "bit_schedule is for affine grids of any width: minmax and lsq"
            )
        widths = [*(phase.bits for phase in self.bit_schedule), self.bits]
        if sorted({*widths}, reverse=True) != widths:
            raise ValueError(
                f"the bits of bit_schedule come down to bits: {widths[-1]}, each fewer than "
                "those before"
            )
