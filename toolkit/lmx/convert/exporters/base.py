"""The input of every export format."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...models.loader import LoadedModel


@dataclass(frozen=True)
class ExportContext:
    """A model to export.

    Attributes:
        name: the base name of single-file formats.
        model: the MLX checkpoint folder that was evaluated.
        adapters: folder of the trained adapter in mlx-lm's format, if any.
        load: loads a checkpoint lazily in its stored dtype.
        info: logs a line.
    """

    name: str
    model: Path
    adapters: Path | None
    load: Callable[[Path], LoadedModel]
    info: Callable[[str], None]
