"""The recipe's schema: every key, its type, its default and its meaning."""

from types import ModuleType
from typing import Annotated, Union

from pydantic import BeforeValidator, Field, model_validator

from ..data.sources import Data
from ..model.source import Model
from ..quant.settings import Quantize
from ..registry import entries
from ..section import Section
from ..stages.distill import Config as Distill
from ..stages.export import Config as Export
from ..stages.train import Config as Train
from ..stages.validate import Config as Validate

TRACKERS = entries("toolkit.run.trackers", "Config")


def _one_of(modules: dict[str, ModuleType], key: str):
    """A block that is the Config of the module which `key` names."""
    configs = tuple(module.Config for module in modules.values())
    # A union of one is its only member, which pydantic refuses to discriminate.
    if len(configs) == 1:
        return configs[0]
    return Annotated[Union[configs], Field(discriminator=key)]  # noqa: UP007


Tracker = _one_of(TRACKERS, "type")


class Stage(Section):
    """One step of the recipe: a mapping with exactly one key."""

    # pydantic's base class has an attribute `validate`, so that field has an alias.

    train: Train | None = None
    """Train or fine-tune."""
    quantize: Quantize | None = None
    """Quantize a finished model; without `method` it is rounded to the nearest."""
    distill: Distill | None = None
    """Distil a draft model for speculative decoding."""
    check: Validate | None = Field(None, alias="validate")
    """Measure from disk and check the gates."""
    export: Export | None = None
    """Publish."""

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value):
        """`- validate:` with nothing below is a block of defaults."""
        if not isinstance(value, dict):
            return value
        return {key: {} if block is None else block for key, block in value.items()}

    @model_validator(mode="after")
    def _one(self):
        if len(self.model_fields_set) != 1:
            raise ValueError(
                "a stage has one key: train, quantize, distill, validate or export"
            )
        return self

    @property
    def kind(self) -> str:
        """train, quantize, distill, validate or export."""
        field = next(iter(self.model_fields_set))
        return type(self).model_fields[field].alias or field

    @property
    def config(self) -> Section:
        """The block of that kind."""
        return getattr(self, next(iter(self.model_fields_set)))


def _model(value):
    return {"path": value} if isinstance(value, str) else value


class Recipe(Section):
    """A whole job: what to begin with, what to read, what to do."""

    model: Annotated[Model, BeforeValidator(_model)]
    """A local folder, a Hub id, a GGUF file, or {fresh: {...}}."""
    data: Data = Data()
    """Rows to train and measure on."""
    seed: int = Field(0, ge=0)
    """Seed of everything random."""
    output: str | None = None
    """The run folder; absent = exports/<recipe name>."""
    tracker: Tracker | None = None
    """Where the figures go besides the run folder; absent = nowhere."""
    stages: list[Stage] = Field(min_length=1)
    """What to do, in order."""
