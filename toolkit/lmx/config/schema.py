"""The recipe schema: the top level and the stages."""

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
    """Log metrics to Weights & Biases."""

    type: Literal["wandb"]
    """Name of the tracker."""
    project: str = "lmx"
    """Project of the run."""
    name: str | None = None
    """Name of the run. Default: the name of the recipe."""
    mode: Literal["online", "offline"] = "offline"
    """offline: log to disk only, for `wandb sync`. online: also send."""


class StageEntry(ConfigModel):
    """One stage: a mapping with exactly one key."""

    train: TrainConfig | None = None
    """Train or fine-tune, with or without adapter, fake quantization and teacher."""
    quantize: QuantizeConfig | None = None
    """Quantize after training. The default method is rtn."""
    draft: DraftConfig | None = None
    """Train a draft model for speculative decoding."""
    evaluate: EvaluateConfig | None = None
    """Evaluate the saved models and check thresholds."""
    export: ExportConfig | None = None
    """Export and publish."""

    @model_validator(mode="before")
    @classmethod
    def _empty_block_is_defaults(cls, value):
        # `- evaluate:` without a block is None in YAML.
        if not isinstance(value, dict):
            return value
        return {key: {} if block is None else block for key, block in value.items()}

    @model_validator(mode="after")
    def _check_one_kind(self):
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
        return getattr(self, self.kind)


def _from_path(value):
    return {"path": value} if isinstance(value, str) else value


class Recipe(ConfigModel):
    """A complete job: base model, data and stages."""

    model: Annotated[ModelConfig, BeforeValidator(_from_path)]
    """Base model: a local folder, a Hub id, a GGUF file, or {from_scratch: {...}}."""
    data: DataConfig = DataConfig()
    """Training and validation data."""
    seed: int = Field(0, ge=0)
    """Random seed."""
    output: str | None = None
    """Run directory. Default: exports/<recipe name>."""
    tracker: WandbConfig | None = None
    """Experiment tracker. Default: none."""
    stages: list[StageEntry] = Field(min_length=1)
    """Stages, in order."""
