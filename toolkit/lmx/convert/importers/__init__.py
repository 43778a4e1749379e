"""Checkpoints that other programs quantized, as MLX's: the same weights, not rounded
again. A format is a file: GPTQ, AWQ, compressed-tensors and GGUF."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from ...data import cache
from ...errors import UserError

if TYPE_CHECKING:
    from ...models.loader import LoadedModel

# Other numbers or files from the same checkpoint: another version.
VERSION = 1


def load_model(
    source: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    compute: str = "auto",
    lazy: bool = False,
    adapter: str | Path | None = None,
) -> "LoadedModel":
    """Load a checkpoint in any format that lmx reads; see `resolve_checkpoint`.

    Args:
        compute, lazy: see `models.loader.load`.
        adapter: folder of an adapter in mlx-lm's or peft's format.

    Raises:
        UserError: the checkpoint or the adapter does not load.
    """
    from ...models.loader import load
    from .peft import resolve_adapter

    path = resolve_checkpoint(
        source, revision=revision, trust_remote_code=trust_remote_code
    )
    return load(
        path,
        trust_remote_code=trust_remote_code,
        compute=compute,
        lazy=lazy,
        adapter=resolve_adapter(adapter) if adapter else None,
    )


def resolve_checkpoint(
    source: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> Path:
    """The MLX folder of a checkpoint: the folder itself, the snapshot of a Hub id, or
    the cached import of a checkpoint in another format.

    Raises:
        UserError: `source` is neither a folder, a GGUF file nor a model of the Hub, or
            it cannot be imported.
    """
    path = fetch_checkpoint(
        source, revision=revision, trust_remote_code=trust_remote_code
    )
    importable = find(path)
    return imported(importable) if importable else path


def fetch_checkpoint(
    source: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> Path:
    """The folder or GGUF file of a checkpoint as published; a Hub id is downloaded.

    Raises:
        UserError: `source` is another kind of file, or the Hub does not have it.
    """
    from ...models.loader import download_snapshot

    path = Path(source).expanduser()
    if path.is_file() and not find(path):
        raise UserError(
            "a model is a folder or a GGUF file; this is neither", place=str(source)
        )
    return (
        path
        if path.exists()
        else download_snapshot(source, revision, trust_remote_code)
    )


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
    from ...models.loader import CHECKPOINT_PATTERNS
    from .convert import convert

    # A card or a picture beside them does not make another model.
    names = CHECKPOINT_PATTERNS if source.is_dir() else [source.name, "tokenizer*.json"]
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
