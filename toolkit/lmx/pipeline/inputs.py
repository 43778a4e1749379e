"""The content of what a stage reads, besides the models that the run itself has made.

A finished stage is kept, and an interrupted one goes on, only with the same content.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..config.loader import LoadedRecipe
from ..config.redaction import redact
from ..convert.importers import fetch_checkpoint, find_importable
from ..data import fingerprint
from ..data.cache import file_hash, key_of
from ..data.dataset import has_split, source_fingerprint
from ..data.hub_datasets import HubDataset
from ..errors import UserError
from ..models.checkpoint import weights_digest
from .stage import Stage

# Kinds of inputs, as in `run.manifest.StageInputs`.
Inputs = dict[str, dict[str, str]]


def stage_inputs(
    stage: Stage, loaded: LoadedRecipe, *, offline: bool = False
) -> Inputs:
    """Hashes of the models and the files that a stage reads, by key and name.

    The result depends on contents and names only, not on places.

    Args:
        offline: leave out what is on the Hub.

    Raises:
        UserError: a model is not there, or a file cannot be read.
    """
    model = loaded.recipe.model
    names = [("model", model.path)] * bool(model.path) + [*stage.named_models.items()]
    models = {}
    for key, name in names:
        place = loaded.find(name)
        if place is None and not offline:
            revision = model.revision if key == "model" else None
            trust = model.trust_remote_code
            place = fetch_checkpoint(name, revision=revision, trust_remote_code=trust)
        if place is not None:
            models[key, name] = checkpoint_hash(place)
    files = {}
    for key, name in stage.named_files:
        # A model that is already there is no file, but an adapter is a folder.
        place = loaded.find(name) or Path(name)
        is_file = place.is_file()
        files[key, name] = file_hash(place) if is_file else weights_digest(place)
    for key, source in stage.sources(loaded.recipe.data):
        is_on_hub = HubDataset.parse(source, loaded.find) is not None
        if offline and is_on_hub:
            continue
        # Nobody reads a dataset of the Hub again for a finished stage.
        with suppress(*[UserError] * is_on_hub):
            files[key, source] = key_of([*_splits(key, source, loaded)])
    return {"models": _named(models), "files": _named(files)}


def checkpoint_hash(place: Path) -> str:
    """A hash of a checkpoint as published: weights, config, tokenizer and template."""
    source = find_importable(place) or place
    if source.is_file():
        files = [source, *sorted(source.parent.glob("tokenizer*.json"))]
        return key_of([*map(file_hash, files)])
    return key_of([weights_digest(source), fingerprint.tokenizer(source)])


def _splits(key: str, source: str, loaded: LoadedRecipe) -> Iterator[list]:
    find = loaded.find
    if key == "data.valid":
        yield source_fingerprint(source, "valid", find=find)
        return
    yield source_fingerprint(source, "train", find=find)
    if not loaded.recipe.data.valid and has_split(source, "valid", find=find):
        yield source_fingerprint(source, "valid", find=find)


def _named(hashes: dict[tuple[str, str], str]) -> dict[str, str]:
    return {redact(f"{key} ({name})"): value for (key, name), value in hashes.items()}
