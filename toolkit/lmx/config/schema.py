"""The recipe's schema: every key, its type, its default and its meaning."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from .base import ConfigModel
from .data import DataConfig
from .draft import DraftConfig
from .evaluate import EvaluateConfig
from .export import ExportConfig
from .model import ModelConfig
from .quantize import QuantizeConfig
from .train import TrainConfig


class WandbConfig(ConfigModel):
    """Send the figures to Weights & Biases, or keep them for `wandb sync`."""

    type: Literal["wandb"]
    """The tracker's name."""
    project: str = "lmx"
    """The project the run is filed under."""
    name: str | None = None
    """The run's name there; absent = the recipe's."""
    mode: Literal["online", "offline"] = "offline"
    """offline = nothing is sent, `wandb sync` does it later; online = sent at once."""


class StageEntry(ConfigModel):
    """One step of the recipe: a mapping with exactly one key."""

    train: TrainConfig | None = None
    """Train or fine-tune."""
    quantize: QuantizeConfig | None = None
    """Quantize a finished model; without `method` it is rounded to the nearest."""
    draft: DraftConfig | None = None
    """Distil a draft model for speculative decoding."""
    evaluate: EvaluateConfig | None = None
    """Measure from disk and check the gates."""
    export: ExportConfig | None = None
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
                "a stage has one key: train, quantize, draft, evaluate or export"
            )
        return self

    @property
    def kind(self) -> str:
        """train, quantize, draft, evaluate or export."""
        return next(iter(self.model_fields_set))

    @property
    def config(self) -> ConfigModel:
        """The block of that kind."""
        return getattr(self, next(iter(self.model_fields_set)))


def _model(value):
    return {"path": value} if isinstance(value, str) else value


class Recipe(ConfigModel):
    """A whole job: what to begin with, what to read, what to do."""

    model: Annotated[ModelConfig, BeforeValidator(_model)]
    """A local folder, a Hub id, a GGUF file, or {from_scratch: {...}}."""
    data: DataConfig = DataConfig()
    """Rows to train and measure on."""
    seed: int = Field(0, ge=0)
    """Seed of everything random."""
    output: str | None = None
    """The run folder; absent = exports/<recipe name>."""
    tracker: WandbConfig | None = None
    """Where the figures go besides the run folder; absent = nowhere."""
    stages: list[StageEntry] = Field(min_length=1)
    """What to do, in order."""
