"""The content of what a stage reads, besides the models that the run itself has made.

A finished stage is kept, and an interrupted one goes on, only with the same content.
"""

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
from ..run.manifest import StageInputs
from .stage import Stage


def stage_inputs(
    stage: Stage, loaded: LoadedRecipe, *, offline: bool = False
) -> StageInputs:
    """Hashes of the models and the files that a stage reads, by key and name.

    The result depends on contents and names only, not on places.

    Args:
        offline: leave out what is on the Hub.

    Raises:
        UserError: a model is not there, or a file cannot be read.
    """
    model = loaded.recipe.model
    names = [("model", model.path)] * bool(model.path) + [*stage.named_models.items()]
    models, files = {}, {}
    for key, name in names:
        place = loaded.find(name)
        if place is None and not offline:
            place = fetch_checkpoint(
                name,
                revision=model.revision if key == "model" else None,
                trust_remote_code=model.trust_remote_code,
            )
        if place is not None:
            models[redact(f"{key} ({name})")] = checkpoint_hash(place)
    for key, name in stage.named_files:
        place = loaded.find(name) or Path(name)
        # An adapter is a folder.
        content = (file_hash if place.is_file() else weights_digest)(place)
        files[redact(f"{key} ({name})")] = content
    for key, source in stage.sources(loaded.recipe.data):
        is_on_hub = HubDataset.parse(source, loaded.find) is not None
        if offline and is_on_hub:
            continue
        # A finished stage does not need its dataset of the Hub any more.
        with suppress(*[UserError] * is_on_hub):
            find, splits = loaded.find, []
            if key != "data.valid":
                splits.append(source_fingerprint(source, "train", find=find))
            has_valid = key == "data.valid"
            if not loaded.recipe.data.valid:
                has_valid = has_split(source, "valid", find=find)
            if has_valid:
                splits.append(source_fingerprint(source, "valid", find=find))
            files[redact(f"{key} ({source})")] = key_of(splits)
    return {"models": models, "files": files}


def checkpoint_hash(place: Path) -> str:
    """A hash of a checkpoint as published: weights, config, tokenizer and template."""
    source = find_importable(place) or place
    if source.is_file():
        files = [source, *sorted(source.parent.glob("tokenizer*.json"))]
        return key_of([*map(file_hash, files)])
    return key_of([weights_digest(source), fingerprint.tokenizer(source)])
