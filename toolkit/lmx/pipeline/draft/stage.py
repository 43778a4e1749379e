"""The draft stage: distil a draft model for speculative decoding, and benchmark it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
from pydantic import ValidationError

from ...config.data import DataConfig
from ...config.draft import DraftConfig
from ...config.messages import Problem
from ..context import DRAFT_FOLDER, ModelArtifact, StageContext
from ..estimate import (
    BatchShape,
    ModelShape,
    StageResources,
    TrainingCost,
    Workload,
    training_dtype,
)
from ..parallel_cost import Traffic, data_parallel
from ..quantize.stage import QuantizeStage
from ..stage import ModelState, RawStage, Stage, needs_training_data
from ..work import Work
from .estimate import draft_benchmark_work, draft_training_cost, generation_cost


class DraftStage(Stage):
    """Distil a draft model into draft/; the current model stays as it is."""

    kind = "draft"
    runs_on_all_ranks = True
    other_models = (("draft_model", "init_from"),)
    config: DraftConfig

    def datasets(self, data: DataConfig) -> list[str]:
        return [*data.train, *data.valid]

    def sources(self, data: DataConfig) -> list[tuple[str, str]]:
        quantization, read = self.config.quantization, super().sources(data)
        if not quantization:
            return read
        return [*read, *QuantizeStage(quantization).sources(data)]

    def outputs(self, output: Path) -> list[Path]:
        return [output / DRAFT_FOLDER]

    @classmethod
    def check(cls, raw: RawStage, state: ModelState) -> Iterator[Problem]:
        yield from super().check(raw, state)
        yield from needs_training_data(raw)

    @classmethod
    def next_state(cls, raw: RawStage, state: ModelState) -> ModelState:
        try:
            draft = DraftConfig(**raw.block)
        except ValidationError:
            draft = None
        state = super().next_state(raw, state)
        return replace(state, has_draft=True, draft=draft)

    def resources(self, workload: Workload, current: ModelShape) -> StageResources:
        config, shape = self.config, workload.shape
        dtype = training_dtype("auto", workload.dtype)
        length = workload.longest + config.data_generation.max_tokens
        block = "draft_model" if config.architecture == "model" else "drafter"
        tokens = max(config.batch_tokens, length)
        batch = BatchShape(length, tokens, tokens)
        training = draft_training_cost(shape, config, batch, dtype.size, workload.find)
        # Only the prompt of an example is used.
        work, data = generation_cost(shape, config, workload.mean_length)
        return StageResources(
            current,
            # A draft model is small beside its target.
            disk=0,
            dtype=dtype,
            training=training,
            steps=_num_steps(config, training, dtype),
            batch_key="batch_tokens",
            # Without the training it would not be the time of the stage.
            work=work + draft_benchmark_work(shape, config) if training else Work(),
            data=data,
            traffic=data_parallel(training.trained) if training else Traffic(),
            remedies=(
                f"{self.address}.batch_tokens={max(8, config.batch_tokens // 2)}",
                f"{self.address}.{block}.num_layers=1",
            ),
        )

    def run(self, context: StageContext) -> ModelArtifact:
        """Train, quantize, benchmark and publish the draft model.

        Raises:
            UserError: no engine could serve the draft model, or a threshold is missed
                (exit code 1) after the report is written.
        """
        # Imported here, so that a recipe is checked without the libraries of a run.
        from .training import DrafterDistillation, DraftModelDistillation

        is_model = self.config.architecture == "model"
        kind = DraftModelDistillation if is_model else DrafterDistillation
        with context.ranks.collective_errors():
            distillation = kind(self.config, context)
        return distillation.run()


def _num_steps(
    config: DraftConfig, training: TrainingCost | None, dtype: mx.Dtype
) -> int | None:
    """The steps; None = unknown."""
    if config.num_steps or training is None:
        return config.num_steps
    return max(1, round(config.budget_seconds / training.step.seconds(dtype)))
