"""Checkpoints that other programs quantized, as MLX's: the same weights, not rounded
again. A format is a file: GPTQ, AWQ, compressed-tensors and GGUF."""

import warnings
from pathlib import Path

from ...data import cache
from ...errors import UserError

# Other numbers or files from the same checkpoint: another version.
VERSION = 1


def find(path: Path) -> Path | None:
    """What there is to import at a path: the folder or its GGUF file; else None.

    Raises:
        UserError: a folder with several GGUF files and no model of its own.
    """
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if (path / "config.json").is_file():
        from ...models.checkpoint import read_config
        from .hf_folder import format_of

        return path if format_of(read_config(path)) else None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise UserError(
            f"this folder has {len(found)} GGUF files",
            place=str(path),
            hint=f"name one of them: {found[0]}",
        )
    return found[0] if found else None


def imported(source: Path) -> Path:
    """The folder in the cache that holds `source`, found by `find`, as MLX's.

    Raises:
        UserError: it cannot be imported, or the cache cannot be written.
    """
    from ...models.loader import PATTERNS
    from .convert import convert

    # A card or a picture beside them does not make another model.
    names = PATTERNS if source.is_dir() else [source.name, "tokenizer*.json"]
    folder = source if source.is_dir() else source.parent
    inputs = sorted({file for name in names for file in folder.glob(name)})
    facts = {file.name: cache.file_hash(file) for file in inputs}
    size = sum(file.stat().st_size for file in inputs)

    def fill(folder: Path) -> dict:
        convert(source, folder)
        return {"source": source.name}

    key = cache.key_of([VERSION, facts])
    # Scales of float32 take twice the room.
    kept = cache.get_or_create(
        "imports", key, fill, warning=warnings.warn, space=3 * size // 2
    )
    return kept.folder
