"""A recipe as a plan: loaded, checked, its stages with their inputs and outputs."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..config import yaml_io
from ..config.errors import KeyPath
from ..config.loader import LoadedRecipe, load_recipe, load_recipe_data
from ..config.messages import Problem
from ..config.quant_spec import QuantSpec
from ..config.redaction import redact
from ..convert.importers import fetch_checkpoint, find_importable
from ..data import fingerprint
from ..data.cache import file_hash, key_of
from ..data.dataset import has_split, source_fingerprint
from ..data.hub_datasets import HubDataset
from ..errors import UserError
from ..installation import install_command
from ..models.checkpoint import read_config, weights_digest
from ..run import manifest
from ..run.earlier_run import EarlierRun
from ..run.tables import KEYS_WITHOUT_EFFECT
from ..run.trackers import TRACKERS, is_installed
from .dataset_checks import check_datasets
from .draft.stage import DraftStage
from .evaluate.stage import EvaluateStage
from .export.stage import ExportStage
from .quantize.stage import QuantizeStage
from .stage import (
    Find,
    ModelState,
    RawStage,
    Stage,
    looks_local,
    missing_source,
    quantization_values,
)
from .train.stage import TrainStage

STAGES: dict[str, type[Stage]] = {
    "train": TrainStage,
    "quantize": QuantizeStage,
    "draft": DraftStage,
    "evaluate": EvaluateStage,
    "export": ExportStage,
}


RUNS = Path("exports")
GGUF = ".gguf"
# The Python functions that a kind of stage uses.
FUNCTIONS = {"train": "loss", "evaluate": "metrics"}


@dataclass(frozen=True)
class PlannedStage:
    """A stage of a plan.

    Attributes:
        inputs: the current model (a folder, a Hub id or "from scratch"), further models
            that the stage names, then its datasets.
        outputs: folders that the stage writes; the first one is its own.
        identity: hash of the stage's block, of the recipe's model and seed, of the data
            that it reads, and of all stages before it. A finished stage with the same
            identity is kept.
    """

    stage: Stage
    inputs: tuple[str, ...]
    outputs: tuple[Path, ...]
    identity: str

    @property
    def name(self) -> str:
        """The stage's folder in the run directory."""
        return self.stage.name


@dataclass(frozen=True)
class RunPlan:
    """The stages of a recipe, its run directory, and the hash of the experiment."""

    loaded: LoadedRecipe
    output: Path
    stages: tuple[PlannedStage, ...]
    recipe_hash: str
    # Whether finished stages will run again.
    restart: bool = False

    @property
    def identities(self) -> dict[str, str]:
        """The identities of the stages by name, in order."""
        return {planned.name: planned.identity for planned in self.stages}

    def inputs(self, name: str, *, offline: bool = False) -> manifest.StageInputs:
        """Hashes of the models and the files that a stage reads, by key and name.

        A finished stage is kept, and an interrupted one goes on, only with the same
        content. Models that the run itself has made are left out. The result depends
        on contents and names only, not on places.

        Args:
            name: of the stage.
            offline: leave out what is on the Hub.

        Raises:
            UserError: a model is not there, or a file cannot be read.
        """
        loaded, model = self.loaded, self.loaded.recipe.model
        [stage] = [each.stage for each in self.stages if each.name == name]
        named = {"model": model.path} if model.path else {}
        models, files = {}, {}
        for key, name in [*named.items(), *stage.named_models.items()]:
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

    def finished(self) -> set[str]:
        """The stages that the run directory has, so that a run would skip them.

        Raises:
            UserError: the run would be refused, because its inputs have changed.
        """
        content = None if self.restart else manifest.read(self.output)
        if content is None:
            return set()
        inputs = partial(self.inputs, offline=True)
        earlier = EarlierRun(self.output, content, self.identities, "", inputs)
        earlier.require_same_inputs()
        return {*earlier.records}


def checkpoint_hash(place: Path) -> str:
    """A hash of a checkpoint as published: weights, config, tokenizer and template."""
    source = find_importable(place) or place
    if source.is_file():
        files = [source, *sorted(source.parent.glob("tokenizer*.json"))]
        return key_of([*map(file_hash, files)])
    return key_of([weights_digest(source), fingerprint.tokenizer(source)])


def plan(loaded: LoadedRecipe) -> RunPlan:
    """The plan of a recipe; a relative run directory is in the working directory."""
    recipe = loaded.recipe
    output = Path(os.path.expanduser(recipe.output or RUNS / loaded.name))
    current = recipe.model.path or "from scratch"
    kinds = [STAGES[s.kind](s.config, n) for n, s in enumerate(recipe.stages, 1)]
    values = _result_values(loaded.resolved)
    blocks, data = values.pop("stages"), values.pop("data")
    functions, stages = values.pop("python") or {}, []
    identity = _hash(values)
    for stage, block in zip(kinds, blocks, strict=True):
        used = functions.get(FUNCTIONS.get(stage.kind, ""))
        identity = _hash([identity, block, used, stage.data_read(data)])
        folder = output / "stages" / stage.name
        inputs = tuple(dict.fromkeys((current, *stage.inputs(recipe.data))))
        outputs = (folder, *stage.outputs(output))
        stages.append(PlannedStage(stage, inputs, outputs, identity))
        if stage.changes_model:
            current = str(folder)
    return RunPlan(loaded, output, tuple(stages), recipe_hash(loaded.resolved))


def recipe_hash(resolved: str) -> str:
    """Sha256 of a resolved recipe without the keys that do not change the result."""
    return _hash(_result_values(resolved))


def _result_values(resolved: str) -> dict:
    data = yaml_io.read_shared(resolved).data
    return {key: value for key, value in data.items() if key not in KEYS_WITHOUT_EFFECT}


def _hash(values: Any) -> str:
    canonical = json.dumps(values, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def check_recipe(data: dict, find: Find) -> list[Problem]:
    """Every problem of raw recipe data that needs more than one key, or a file.

    Args:
        find: the path of a file that the recipe names; None if there is none.
    """
    dataset_problems, formats = check_datasets(data.get("data"), find)
    problems = [*_check_model(data, find), *dataset_problems]
    entries, datasets = data.get("stages"), data.get("data")
    datasets = datasets if isinstance(datasets, dict) else {}
    stages = []
    for index, entry in enumerate(entries if isinstance(entries, list) else []):
        if isinstance(entry, dict) and len(entry) == 1:
            [(kind, block)] = entry.items()
            block = block if isinstance(block, dict) else {}
            path = ("stages", index, kind)
            stages.append(RawStage(path, kind, block, datasets, find, formats))
    problems += _check_functions(data, stages)
    problems += _check_trackers(data.get("tracker"))
    state = initial_state(data, find)
    for raw in stages:
        if stage := STAGES.get(raw.kind):
            problems += stage.check(raw, state)
            state = stage.next_state(raw, state)
        else:
            # The schema reports the unknown kind. It may have trained the model.
            state = replace(state, is_untrained=False)
    return problems


# Reading with the checks of all stages; no weight is read.
load = partial(load_recipe, check=check_recipe)
load_data = partial(load_recipe_data, check=check_recipe)


def initial_state(data: dict, find: Find) -> ModelState:
    """The recipe's model before its first stage."""
    model, (_, source) = data.get("model"), _model_path(data)
    try:
        config = _config_of(find(source) if source else None)
    # `_check_model` reports it.
    except UserError:
        config = {}
    quantization = None
    if config.get("quantization"):
        grids = config["quantization"].values()
        layers = [grid for grid in grids if isinstance(grid, dict)]
        # An entry of mlx-lm's of every layer of experts.
        has_global_scale = any(layer.get("global_scale") for layer in layers)
        block = config["quantization"] | {"global_scale": has_global_scale}
        quantization = quantization_values(block, QuantSpec)
    elif config.get("quantization_config"):
        quantization = {}
    is_untrained = isinstance(model, dict) and model.get("from_scratch") is not None
    return ModelState(config, is_untrained, quantization, source=source)


def _config_of(place: Path | None) -> dict:
    """The config of a checkpoint on this disk; empty if there is none.

    Raises:
        UserError: the checkpoint is damaged, or cannot be imported.
    """
    if place is None or not _is_checkpoint(place):
        return {}
    source = find_importable(place)
    if source is None or source.is_dir():
        return read_config(place)
    # Needs NumPy, which reading another recipe does not load.
    from ..convert.importers import gguf

    return gguf.outline(source)[0]


def _model_path(data: dict) -> tuple[KeyPath, str | None]:
    """The keys of the model's path in the recipe, and the path."""
    model = data.get("model")
    if isinstance(model, dict) and isinstance(model.get("path"), str):
        return ("model", "path"), model["path"]
    return ("model",), model if isinstance(model, str) else None


def _check_model(data: dict, find: Find) -> Iterator[Problem]:
    path, source = _model_path(data)
    model = data.get("model")
    place = find(source) if source else None
    if source and place is None and looks_local(source, find):
        yield missing_source(path, source, find)
    elif place and not place.is_dir() and place.suffix != GGUF:
        yield Problem(path, f"a model is a folder; '{source}' is a file")
    elif place and place.is_dir() and not _is_checkpoint(place):
        message = f"the folder '{source}' is not a model: it has no config.json"
        yield Problem(path, message)
    else:
        try:
            _config_of(place)
        except UserError as error:
            yield Problem(path, f"{error.place}: {error.message}", error.hint)
    block = model if isinstance(model, dict) else {}
    is_local = place is not None or block.get("from_scratch")
    if is_local and block.get("revision") is not None:
        hint = "a revision belongs to a Hub id"
        yield Problem(("model", "revision"), "this model is not on the Hub", hint)


def _is_checkpoint(place: Path) -> bool:
    if place.is_file():
        return place.suffix == GGUF
    return (place / "config.json").is_file() or any(place.glob(f"*{GGUF}"))


def _check_functions(data: dict, stages: list[RawStage]) -> Iterator[Problem]:
    """Problems of Python functions that no stage would call."""
    block = data.get("python")
    block = block if isinstance(block, dict) else {}
    pairs = [(raw, STAGES.get(raw.kind)) for raw in stages]
    trainings = [raw for raw, stage in pairs if stage and stage.calls == "loss"]
    measures = any(stage.calls == "metrics" for _, stage in pairs if stage)
    if block.get("loss"):
        if not trainings:
            yield Problem(("python", "loss"), "no train stage uses this loss", of="key")
        for raw in trainings:
            for key in ("teacher", "loss", "fsdp"):
                if raw.value(key) not in (None, False):
                    message = f"a loss from Python does not work with {key}"
                    yield Problem((*raw.path, key), message, "leave one out", "key")
    if block.get("metrics") and not measures:
        message = "no evaluate stage measures these metrics"
        yield Problem(("python", "metrics"), message, "add an evaluate stage", "key")


def _check_trackers(value: Any) -> Iterator[Problem]:
    entries = enumerate(value) if isinstance(value, list) else [(None, value)]
    for index, entry in entries:
        path = ("tracker",) if index is None else ("tracker", index)
        name = entry.get("type") if isinstance(entry, dict) else entry
        if isinstance(name, str) and name in TRACKERS and not is_installed(name):
            message = f"{TRACKERS[name].PACKAGE} is not installed"
            yield Problem(path, message, install_command(TRACKERS[name].EXTRA))
