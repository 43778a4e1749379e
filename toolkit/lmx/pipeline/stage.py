"""The protocol of a stage kind: what it reads and writes, checks, costs and does."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ValidationError

from ..config.base import ConfigModel
from ..config.data import DataConfig
from ..config.draft import DraftConfig
from ..config.errors import KeyPath
from ..config.messages import Problem, nearest
from ..config.quant_spec import QuantizationConfig, QuantSpec
from ..data import readers
from ..interfaces import Communicator
from .context import ModelArtifact, StageContext
from .estimate import Estimate, ModelShape, Workload

Find = Callable[[str], Path | None]
# Formats of the sources of each split of a recipe; None = unknown.
Formats = dict[str, list[str | None]]

FILE_SUFFIXES = (*readers.SUFFIXES, ".gguf", ".safetensors")


@dataclass(frozen=True)
class ModelState:
    """The current model between two stages, as far as the raw recipe tells.

    Attributes:
        config: config.json of the recipe's model; empty if it cannot be read here.
        is_untrained: the model is from scratch, and no stage has trained it.
        quantization: values of its quantization block, empty if they are unknown;
            None = full precision.
        source: the recipe's name of its model while no stage has changed it.
        has_adapter: the last train stage trained an adapter.
        has_draft: a draft stage has distilled a draft model from the current model.
        draft: the block of that stage; None if it is not valid.
    """

    config: dict
    is_untrained: bool = False
    quantization: dict | None = None
    source: str | None = None
    has_adapter: bool = False
    has_draft: bool = False
    draft: DraftConfig | None = None


@dataclass(frozen=True)
class RawStage:
    """A stage of a recipe before validation: any key may be missing or malformed.

    Attributes:
        path: where the stage's block is in the recipe.
        data: the recipe's data block.
        find: the path of a file that the recipe names; None if there is none.
        formats: of the sources of `data`.
    """

    path: KeyPath
    kind: str
    block: dict
    data: dict
    find: Find
    formats: Formats

    def value(self, *keys: str) -> Any:
        """The value at these keys of the stage's block; None if there is none."""
        value: Any = self.block
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def items(self, key: str) -> Iterator[tuple[KeyPath, str]]:
        """Paths and values of the strings in a list of the stage's block."""
        values = self.block.get(key)
        for index, value in enumerate(values if isinstance(values, list) else []):
            if isinstance(value, str):
                yield (*self.path, key, index), value


class Stage(ABC):
    """A stage of a recipe. A stage kind is one subclass.

    The class-level methods check raw recipe data, so that all errors of a recipe are
    reported together even if a block does not fit the schema.

    Attributes:
        config: the stage's block.
        index: position in the recipe, from 1.
        kind: the stage's key in a recipe.
        runs_on_all_ranks: every process calls `run`, not rank 0 alone.
        changes_model: the stage leaves a new current model in its folder.
        needs_trained_model: the stage cannot use a model with random weights.
        calls: key of the Python function in `python:` that the stage calls, if any.
        other_models: keys of further models that the stage's block may name.
    """

    kind: ClassVar[str]
    runs_on_all_ranks: ClassVar[bool] = False
    changes_model: ClassVar[bool] = False
    needs_trained_model: ClassVar[bool] = True
    calls: ClassVar[str] = ""
    other_models: ClassVar[tuple[tuple[str, str], ...]] = ()

    def __init__(self, config: ConfigModel, index: int = 1):
        self.config = config
        self.index = index

    @property
    def name(self) -> str:
        """The stage's folder in the run directory."""
        return f"{self.index}-{self.kind}"

    @property
    def address(self) -> str:
        """The start of an override of the stage's keys."""
        return f"stages.{self.index}.{self.kind}"

    @property
    def named_models(self) -> dict[str, str]:
        """Further models that the stage's block names, by key."""
        models = {}
        for key, name in self.other_models:
            block = getattr(self.config, key)
            if model := block and getattr(block, name):
                models[f"{key}.{name}"] = model
        return models

    @property
    def named_files(self) -> list[tuple[str, str]]:
        """Keys and names of files and adapters that the stage's block names."""
        return []

    def sources(self, data: DataConfig) -> list[tuple[str, str]]:
        """Keys and names of the datasets that the stage's result depends on."""
        read = self.data_read(data.model_dump())
        splits = ((s, read.get(s)) for s in ("train", "valid"))
        named = [(f"data.{s}", names) for s, names in splits if isinstance(names, list)]
        return [(key, name) for key, names in named for name in names]

    def inputs(self, data: DataConfig) -> list[str]:
        """The models that the stage names, then the datasets it reads."""
        return [*self.named_models.values(), *self.datasets(data)]

    def datasets(self, data: DataConfig) -> list[str]:
        """The datasets that the stage reads."""
        return []

    def data_read(self, data: dict) -> dict:
        """The values of the recipe's data block that the stage's result depends on."""
        return data

    def outputs(self, output: Path) -> list[Path]:
        """Folders of the run directory that the stage writes besides its own."""
        return []

    @classmethod
    def check(cls, raw: RawStage, state: ModelState) -> Iterator[Problem]:
        """Problems that need more than one key, or a file. Subclasses add to them."""
        if cls.changes_model and state.has_draft:
            yield Problem(
                raw.path,
                "this stage changes the model that the draft was distilled from",
                "distil last, from the model that will be served",
                "key",
            )
        if cls.needs_trained_model and state.is_untrained:
            hint = "begin with a train stage"
            yield Problem(
                raw.path, "the model from scratch is untrained", hint, "block"
            )
        for key, name in cls.other_models:
            source = raw.value(key, name)
            if isinstance(source, str) and is_missing(source, raw.find):
                yield missing_source((*raw.path, key, name), source, raw.find)

    @classmethod
    def next_state(cls, raw: RawStage, state: ModelState) -> ModelState:
        """The current model after the stage."""
        source = None if cls.changes_model else state.source
        return replace(state, is_untrained=False, source=source)

    @property
    def quantization(self) -> QuantizationConfig | None:
        """How the stage quantizes the current model; None = not at all."""
        return None

    def estimate(self, workload: Workload, current: ModelShape) -> Estimate:
        """What the stage needs of the machine.

        Args:
            current: the checkpoint that the stage begins with.
        """
        return Estimate(current)

    def offline_checks(self) -> Iterator[str]:
        """Lines for the dry run, from checks that need no network.

        Raises:
            UserError: a check fails.
        """
        yield from ()

    def check_ranks(self, ranks: Communicator) -> None:  # noqa: B027
        """Raise UserError if these processes cannot run the stage."""

    def remote_checks(self) -> None:  # noqa: B027
        """Raise UserError if a program or a server would refuse the stage's work."""

    @abstractmethod
    def run(self, context: StageContext) -> ModelArtifact:
        """Do the work in `context.folder`; returns the current model after it.

        Raises:
            UserError: the stage cannot do its work, or a threshold is missed.
        """


def needs_training_data(raw: RawStage) -> Iterator[Problem]:
    """The problem of a stage that trains and finds no training data."""
    if not raw.data.get("train"):
        hint = "name training examples in data.train"
        yield Problem(raw.path, "nothing to train on", hint, of="key")


def quantization_values(block: Any, kind: type[QuantSpec] = QuantizationConfig) -> dict:
    """The values of a raw quantization block, with the grid as the checkpoint names it;
    empty if they are not valid."""
    block = block if isinstance(block, dict) else {}
    try:
        values = {k: v for k, v in block.items() if k in kind.model_fields}
        quantization = kind(**values)
    except ValidationError:
        return {}
    stored = quantization.stored
    return quantization.model_dump() | (stored.model_dump() if stored else {})


def is_missing(source: str, find: Find) -> bool:
    """Whether a model or dataset must be on this disk, and is not."""
    return find(source) is None and looks_local(source, find)


def looks_local(source: str, find: Find) -> bool:
    """Whether a model or dataset must be on this disk, and not on the Hub."""
    name = source.partition("@")[0]
    if source.startswith((".", "/", "~")) or name.count("/") > 1:
        return True
    owner, slash, _ = name.partition("/")
    folder = find(owner) if slash else None
    return source.endswith(FILE_SUFFIXES) or (folder is not None and folder.is_dir())


def missing_source(path: KeyPath, source: str, find: Find) -> Problem:
    """The problem of a file that does not exist, with the nearest name beside it."""
    folder = find(str(Path(source).parent))
    names = [p.name for p in folder.iterdir()] if folder and folder.is_dir() else []
    hint = nearest(Path(source).name, names)
    if not (hint or "").startswith("did"):
        hint = "a relative path starts at the working directory, else beside recipes/"
    return Problem(path, f"no such file or folder: '{source}'", hint)
