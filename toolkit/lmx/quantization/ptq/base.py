"""What a quantization method is given."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from ...config.quant_spec import QuantSpec
from ...run.logger import RunLogger

if TYPE_CHECKING:
    from ...data.calibration import CalibrationBatch


@dataclass(frozen=True)
class PTQContext:
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
    windows: Callable[[int], "CalibrationBatch"]
    folder: Path
    logger: RunLogger
    reread: Callable[[], nn.Module] | None = None
