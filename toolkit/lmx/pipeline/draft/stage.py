"""The draft stage: distil a draft model for speculative decoding, and benchmark it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from ...config.data import DataConfig
from ...config.draft import DraftConfig
from ...config.messages import Problem
from ..context import DRAFT_FOLDER, ModelArtifact, StageContext
from ..estimate import Estimate, ModelShape, Workload
from ..quantize.stage import QuantizeStage
from ..stage import ModelState, RawStage, Stage, needs_training_data
from .estimate import estimate_draft


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

    def estimate(self, workload: Workload, current: ModelShape) -> Estimate:
        config = self.config
        block = "draft_model" if config.architecture == "model" else "drafter"
        remedies = (
            f"{self.address}.batch_tokens={max(8, config.batch_tokens // 2)}",
            f"{self.address}.{block}.num_layers=1",
        )
        return replace(estimate_draft(config, workload, current), remedies=remedies)

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
        distillation = kind(self.config, context)
        return distillation.run()
