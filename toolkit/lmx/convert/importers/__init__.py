"""Imports checkpoints of other formats as MLX folders, without requantization.

Formats: GPTQ, AWQ and compressed-tensors folders (`hf_folder.FORMATS`), and GGUF files.
PEFT adapters: `peft`.
"""

import json
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...config.bundled import bundled_data
from ...config.text_files import require_regular
from ...data import cache
from ...errors import UserError
from ...files.json_files import MAX_JSON_BYTES

if TYPE_CHECKING:
    from ...models.loader import LoadedModel

# Part of the cache key; changes when an import writes other values or files.
VERSION = 2


def load_model(
    source: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    adapter: str | Path | None = None,
    **options: Any,
) -> "LoadedModel":
    """Load a checkpoint in any format that lmx reads; see `resolve_checkpoint`.

    Args:
        adapter: folder of an adapter in mlx-lm's or peft's format.
        options: further ones of `models.loader.load`.

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
        adapter=resolve_adapter(adapter) if adapter else None,
        **options,
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
    if (source := find_importable(path)) is None:
        return path
    from ...data.tokenizer_files import check_tokenizer_files
    from ...models.loader import CHECKPOINT_PATTERNS
    from ...models.safetensors_io import read_header
    from .convert import convert_checkpoint
    from .gguf import outline

    # Other files, such as a model card, do not change the import.
    names = CHECKPOINT_PATTERNS if source.is_dir() else [source.name, "tokenizer*.json"]
    folder = source if source.is_dir() else source.parent
    inputs = sorted({file for name in names for file in folder.glob(name)})
    # Damaged files are refused before whole files are hashed: they may be of any size.
    for file in inputs:
        is_weights = file.suffix in (".safetensors", ".gguf")
        require_regular(file, max_bytes=None if is_weights else MAX_JSON_BYTES)
        if file.suffix == ".safetensors":
            read_header(file)
    if source.is_dir():
        check_tokenizer_files(source)
    else:
        outline(source)
    facts = {str(f.relative_to(folder)): cache.file_hash(f) for f in inputs}
    size = sum(file.stat().st_size for file in inputs)

    def fill(folder: Path) -> dict:
        convert_checkpoint(source, folder)
        return {"source": source.name}

    key = cache.key_of([VERSION, facts])
    # Float32 scales take more space than the published ones.
    store = cache.store(warnings.warn)
    return store.get_or_make("imports", key, fill, space=3 * size // 2).folder


def fetch_checkpoint(
    source: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> Path:
    """The folder or GGUF file of a checkpoint as published; a Hub id is downloaded.

    A model in data/ that is not in the working directory is the one that comes with
    lmx, as in a recipe.

    Raises:
        UserError: `source` is another kind of file, or the Hub does not have it.
    """
    from ...models.loader import checkpoint_folder

    path = Path(os.path.expanduser(source))
    if not os.path.exists(path):
        source = bundled_data(path) or source
    if not os.path.isfile(path):
        return checkpoint_folder(
            source, revision=revision, trust_remote_code=trust_remote_code
        )
    if find_importable(path):
        return path
    raise UserError(
        "a model is a folder or a GGUF file; this is neither", place=str(source)
    )


def find_importable(path: Path) -> Path | None:
    """The folder or GGUF file at a path if it must be imported; else None.

    Raises:
        UserError: the folder has several GGUF files and no config.json.
    """
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if (path / "config.json").is_file():
        from ...models.checkpoint import read_config

        config = read_config(path)
        if "quant_method" not in json.dumps(config):
            return None
        # Loads NumPy, which is most of the time in which a recipe is checked.
        from .hf_folder import find_format

        return path if find_format(config) else None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise UserError(
            f"this folder has {len(files)} GGUF files",
            place=str(path),
            hint=f"name one of them: {files[0]}",
        )
    return files[0] if files else None
