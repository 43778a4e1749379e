"""What a quantization method is given."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from pydantic import Field

from ..run.report import Report
from ..section import Section
from .spec import QuantSpec


class Calibration(Section):
    """The tokens a method watches the layers on."""

    source: str | None = None
    """A file, folder, Hub id or builtin:<name>; absent = the recipe's training rows, or
    builtin:stdlib where it has none."""
    tokens: int | None = Field(None, ge=1)
    """How many; absent = 8 times the width of the widest layer, at least 32768."""
    length: int = Field(512, ge=8)
    """Tokens of a window; documents are joined and cut."""


@dataclass(frozen=True)
class Task:
    """A model to quantize.

    Attributes:
        model: its weights may be unread.
        specs: grid by path of the layers to quantize.
        dtype: the type the checkpoint stores.
        windows: calibration tokens, int32 [n, length], at least as many as asked for
            if the source has them.
        folder: where a method may keep what it has done so far; deleted when the
            checkpoint is written.
        reread: the model again, its weights unread; None = they stay in memory.
    """

    model: nn.Module
    specs: dict[str, QuantSpec]
    dtype: mx.Dtype
    windows: Callable[[Calibration, int], mx.array]
    folder: Path
    report: Report
    reread: Callable[[], nn.Module] | None = None
