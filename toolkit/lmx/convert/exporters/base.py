"""The input of every export format."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...models.loader import LoadedModel


@dataclass(frozen=True)
class FormatCard:
    """What the model card of a format says besides the facts of the run.

    Attributes:
        kind: what the files are, as the start of a sentence.
        library: the Hub's name of the library that loads them; None = it has none.
        tags: the Hub's tags of the format.
        language: of `usage`.
        usage: how to use the files; {name} stands for the model's name.
        suffix: what the title ends with.
        keeps_bits: whether weights have as many bits as in the checkpoint.
        is_dequantized: whether quantized weights become numbers of the model's dtype.
        is_adapter: whether they are an adapter of the base model.
    """

    kind: str
    library: str | None
    tags: tuple[str, ...]
    language: str
    usage: str
    suffix: str = ""
    keeps_bits: bool = False
    is_dequantized: bool = False
    is_adapter: bool = False


@dataclass(frozen=True)
class ExportContext:
    """A model to export.

    Attributes:
        name: the base name of single-file formats.
        model: the MLX checkpoint folder that was evaluated.
        adapters: folder of the trained adapter in mlx-lm's format, if any.
        draft: folder of the model's drafter or draft model, if any.
        load: loads a checkpoint lazily in its stored dtype.
        info: logs a line.
    """

    name: str
    model: Path
    adapters: Path | None
    load: Callable[[Path], LoadedModel]
    info: Callable[[str], None]
    draft: Path | None = None
