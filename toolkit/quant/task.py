"""What a quantization method is given."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import mlx.core as mx
import mlx.nn as nn
from pydantic import BeforeValidator, Field, model_validator

from ..run.report import Report
from ..section import Section
from .spec import Bits, Quantization, QuantSpec

if TYPE_CHECKING:
    from ..data.windows import Windows


class Calibration(Section):
    """The tokens a method watches the layers on."""

    source: str | None = None
    """A file, folder, Hub id or builtin:<name>; absent = the recipe's training rows, or
    builtin:stdlib where it has none."""
    tokens: int | None = Field(None, ge=1)
    """How many; absent = 8 times the width of the widest layer, at least 32768."""
    length: int = Field(512, ge=8)
    """Tokens of a window."""
    count: Literal["everything", "answers"] = "everything"
    """everything = documents are joined and cut, and every token counts; answers = rows
    are watched one by one, as training sees them, and what it trains on counts (see
    data.train_on): for a model of one task. With rtn and gptq, the latter without fold,
    blocks and budget."""
    held_out: int = Field(16384, ge=8)
    """Tokens to judge by, of the recipe's validation rows, else of the source."""


class Tune(Section):
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


Tuning = Annotated[Tune | None, BeforeValidator(_switched)]


class Budget(Section):
    """What the model may weigh; every layer's grid is chosen for it by measurement."""

    bits_per_weight: float | None = Field(None, gt=0)
    """All bytes of the checkpoint's tensors times 8, by the weights of the model, as
    report.json counts them; or give bytes."""
    bytes: float | None = Field(None, gt=0)
    """Bytes of all tensors of the checkpoint; or give bits_per_weight."""
    bits: list[Bits] = Field([2, 3, 4, 5, 6, 8], min_length=1)
    """Bits that a layer may get."""
    group_sizes: list[Literal[32, 64, 128]] = Field([32, 64, 128], min_length=1)
    """Group sizes that a layer may get."""

    @model_validator(mode="after")
    def _one_measure(self):
        if (self.bits_per_weight is None) == (self.bytes is None):
            raise ValueError("give either bits_per_weight or bytes")
        return self

    def limit(self, weights: int) -> int:
        """Bytes that a model of so many weights may have."""
        return int(self.bytes or self.bits_per_weight * weights / 8)


class PostTraining(Quantization):
    """What all methods have that quantize a finished model."""

    calibration: Calibration = Calibration()
    """Tokens that the model is watched on, and its scales tuned on."""
    tune: Tuning = None
    """Tune scales and biases; false = off, {} = on, as it is by default after gptq."""
    gates: bool = True
    """Undo a step that is no better on held-out tokens; false = do not compare, as for
    a model too large to be run twice."""
    budget: Budget | None = None
    """Present = grids by layer that lose least within it; the block's own bits and
    group size are for what it leaves open. Layers named in `layers`, and those that the
    model itself asks a grid for, keep theirs."""

    @model_validator(mode="after")
    def _budget_is_affine(self):
        if self.budget and self.mode != "affine":
            raise ValueError(f"a budget chooses affine grids; the mode is {self.mode}")
        return self

    @model_validator(mode="after")
    def _counts_answers(self):
        alike = " and ".join(self.takes_all_alike)
        if self.calibration.count == "answers" and alike:
            raise ValueError(
                f"{alike} takes all tokens alike: leave calibration.count out"
            )
        return self

    @property
    def takes_all_alike(self) -> list[str]:
        """What of it does not tell tokens that count from others."""
        return ["budget"] if self.budget else []


@dataclass(frozen=True)
class Task:
    """A model to quantize.

    Attributes:
        model: its weights may be unread.
        specs: grid by path of the layers to quantize.
        dtype: the type the checkpoint stores.
        windows: at least so many calibration tokens, if the source has them.
        folder: where a method may keep what it has done so far; deleted when the
            checkpoint is written.
        reread: the model again, its weights unread; None = they stay in memory.
    """

    model: nn.Module
    specs: dict[str, QuantSpec]
    dtype: mx.Dtype
    windows: Callable[[int], "Windows"]
    folder: Path
    report: Report
    reread: Callable[[], nn.Module] | None = None
