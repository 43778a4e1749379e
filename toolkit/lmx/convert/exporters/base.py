"""What the export formats are given."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...models.loader import LoadedModel


@dataclass(frozen=True)
class ExportContext:
    """A model on its way out.

    Attributes:
        name: what a file of it is called.
        model: the checkpoint folder that was measured.
        adapters: folder of the adapter that was trained, in mlx-lm's format, if any.
        load: opens a checkpoint as it is stored, its weights unread.
        say: tells the user.
    """

    name: str
    model: Path
    adapters: Path | None
    load: Callable[[Path], LoadedModel]
    info: Callable[[str], None]
