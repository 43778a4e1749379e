"""The recipe schema: the top level and the stages."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator

from .base import ConfigModel
from .data import DataConfig
from .draft import DraftConfig
from .evaluate import EvaluateConfig
from .export import ExportConfig
from .model import ModelConfig
from .parallel import TENSOR_PARALLEL_STAGES, ParallelConfig
from .quantize import QuantizeConfig
from .trackers import Trackers
from .train import TrainConfig
from .validation import require_path

MAX_STAGES = 100


class PythonConfig(ConfigModel):
    """The Python functions that a run needs, as `lmx.train` got them: module and name,
    and a hash of the source and the default values."""

    loss: str | None = None
    """The loss of train stages."""
    metrics: dict[str, str] = Field({})
    """Metrics of evaluate stages, by name."""

    @property
    def names(self) -> list[str]:
        """The arguments of `lmx.train` that the run needs."""
        metrics = ", ".join(f"{name!r}: ..." for name in self.metrics)
        return ["loss=..."] * bool(self.loss) + [f"metrics={{{metrics}}}"] * bool(
            metrics
        )


class StageEntry(
    ConfigModel, json_schema_extra={"minProperties": 1, "maxProperties": 1}
):
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


class RecipeConfig(ConfigModel):
    """A complete job: base model, data and stages."""

    model: Annotated[
        ModelConfig,
        BeforeValidator(
            lambda value: {"path": value} if isinstance(value, str) else value,
            json_schema_input_type=str | ModelConfig,
        ),
    ] = Field(examples=["Qwen/Qwen3-0.6B", "data/tiny-base", {"from_scratch": {}}])
    """Base model: a local folder, a Hub id, a GGUF file, or {from_scratch: {...}}."""
    data: DataConfig = DataConfig()
    """Training and validation data."""
    seed: int = Field(0, ge=0)
    """Random seed."""
    output: str | None = Field(None, examples=["exports/try"])
    """Run directory. Default: `exports/<recipe name>`."""
    parallel: ParallelConfig = ParallelConfig()
    """What the processes of a run divide among themselves."""
    tracker: Trackers = Field([])
    """Experiment trackers: a name, a block, or a list of both."""
    stages: list[StageEntry] = Field(min_length=1, max_length=MAX_STAGES)
    """Stages, in order."""
    python: PythonConfig | None = None
    """Python functions that the run needs. `lmx.train` writes this block, and such a
    recipe runs only with `lmx.train` and the same functions."""

    @model_validator(mode="after")
    def _check_stages(self):
        kinds = [stage.kind for stage in self.stages]
        exports = [stage.config.formats for stage in self.stages if stage.export]
        formats = [name for names in exports for name in names]
        for name in dict.fromkeys(formats):
            if formats.count(name) > 1:
                raise ValueError(
                    f"two export stages have the format {name}, and the second one "
                    "would replace what the first one wrote"
                )
        if kinds.count("draft") > 1:
            raise ValueError("a recipe has at most one draft stage")
        size = self.parallel.tensor
        for stage in self.stages if size > 1 else ():
            if stage.kind not in TENSOR_PARALLEL_STAGES:
                raise ValueError(
                    f"parallel.tensor is {size}, and a {stage.kind} stage holds the "
                    "whole model in every process: use parallel.data"
                )
        return self

    def values(self, *, exclude_defaults: bool = False) -> dict[str, Any]:
        """All values as plain data, which is the same recipe; or those that are not
        the defaults."""
        options = {"mode": "json", "exclude_defaults": exclude_defaults}
        stages = [
            {s.kind: s.config.model_dump(by_alias=True, **options)} for s in self.stages
        ]
        return self.model_dump(exclude={"stages"}, **options) | {"stages": stages}

    @field_validator("output")
    @classmethod
    def _check_output(cls, value: str | None) -> str | None:
        require_path(value or "")
        return value
