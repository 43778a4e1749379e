"""The teacher of a train stage: its model, its completions and its targets."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import mlx.core as mx
import numpy as np

from ...config.train import TrainConfig
from ...data.batching import (
    Batch,
    BucketBatchSampler,
    ExampleDataset,
    StepSampler,
    TargetBatches,
    example_indices,
)
from ...data.record_formats import DataRecord
from ...data.tokenizer_files import tokenizer_difference
from ...errors import UserError
from ...generation.completions import CachedGenerator, replace_completions
from ...models.checkpoint import config_int, read_config, weights_digest
from ...models.loader import load_tokenizer
from ...training.distillation import DistillationLoss, OnlineTeacher
from ...training.document_mask import DocumentCaches
from ...training.teacher_cache import (
    CachedTargets,
    TeacherClient,
    cache_teacher_targets,
)
from ..context import StageContext
from .cross_tokenizer import CrossTokenizer
from .objective import Objective
from .qat import QATModel


class DistillationObjective(Objective):
    """The loss against a teacher, which is loaded when it is first used.

    Raises:
        UserError: there is no such teacher, it is the same model as the student, or it
            has another tokenizer and the recipe asks for what that cannot give.
    """

    def __init__(self, config: TrainConfig, context: StageContext, model: QATModel):
        super().__init__(config, context, model)
        self.teacher, self.student = config.teacher, model.loaded
        self.folder = self._resolve_folder()
        trust = context.source.trust_remote_code
        tokenizer = load_tokenizer(self.folder, trust_remote_code=trust)
        self.cross_tokenizer = None
        if difference := tokenizer_difference(self.student.tokenizer, tokenizer):
            self.cross_tokenizer = CrossTokenizer(
                self.teacher, context, self.student, self.folder, tokenizer, difference
            )

    @cached_property
    def digest(self) -> str:
        """Hash of the teacher's weights and config, and of another tokenizer."""
        digest = weights_digest(self.folder)
        if self.cross_tokenizer is None:
            return digest
        return f"{digest} {self.cross_tokenizer.digest}"

    @cached_property
    def online(self) -> OnlineTeacher:
        """The teacher in memory."""
        self.context.logger.info(f"teacher: {self.folder}")
        return OnlineTeacher(self.context.load(self.folder).model)

    @cached_property
    def client(self) -> TeacherClient:
        """Computes the predictions that are stored."""
        configs = (read_config(self.folder), self.student.config)
        if self.cross_tokenizer:
            configs = (self.student.config,)
        sizes = filter(None, (config_int(config, "vocab_size") for config in configs))
        vocabulary = min(sizes, default=len(self.student.tokenizer.get_vocab()))
        return TeacherClient(
            lambda: self.online,
            self.digest,
            vocabulary,
            self.context.logger,
            self.context.ranks,
        )

    def replace_completions(self, examples: ExampleDataset) -> ExampleDataset:
        """With `sequence_level`, the examples have the teacher's completions."""
        config, context = self.teacher.sequence_level, self.context
        if config is None:
            return examples
        generator = CachedGenerator(
            lambda: self.online.model,
            self.digest,
            frozenset(self.student.tokenizer.eos_token_ids),
            context.logger,
            context.ranks,
        )
        return replace_completions(
            examples,
            generator,
            temperatures=config.temperatures,
            max_tokens=config.max_tokens,
            max_seq_length=context.data.max_seq_length,
            seed=context.seed,
        )

    def enable_packing(self) -> None:
        if not self.teacher.offline:
            self.online.document_caches = DocumentCaches(self.online.model)

    def training(
        self, batches: StepSampler, steps: int, compute: mx.Dtype
    ) -> TargetBatches:
        targets = None
        if self.teacher.offline:
            indices = example_indices(batches, steps)
            records = self.context.rows.train
            targets = self._cached_targets(batches.examples, indices, records)
        self.loss = DistillationLoss(
            self.teacher, None if self.teacher.offline else self.online
        )
        return TargetBatches(batches, self.digest, targets)

    def validation(
        self, valid: BucketBatchSampler, batches: list[Batch], compute: mx.Dtype
    ) -> Sequence[Batch]:
        if not self.teacher.offline:
            return batches
        indices = {index for batch in batches for index in batch.example_indices}
        targets = self._cached_targets(
            valid.examples, np.array(sorted(indices)), self.context.rows.valid
        )
        return EvalBatchesWithTargets(batches, targets)

    def _cached_targets(
        self,
        examples: ExampleDataset,
        indices: np.ndarray,
        records: Iterable[DataRecord],
    ) -> CachedTargets:
        client = self.client
        if self.cross_tokenizer:
            mapped = self.cross_tokenizer.align(examples, indices, records)
            client = replace(client, mapped=mapped)
        return cache_teacher_targets(
            examples,
            indices,
            client,
            top_k=self.teacher.top_k,
            temperature=self.teacher.temperature,
        )

    def _resolve_folder(self) -> Path:
        name, context = self.teacher.model, self.context
        if name is not None:
            return context.resolve(name).absolute()
        if context.current is None:
            raise UserError(
                "a model from scratch cannot teach itself",
                hint="name another model in teacher.model",
            )
        folder = context.require_visible(context.current.reference)
        if "quantization" in read_config(folder):
            raise UserError(
                "the recipe's model is quantized, and its full-precision baseline is "
                "unknown",
                place=str(folder),
                hint="name it in teacher.model",
            )
        is_same = folder == context.initial_model and not self.config.qat
        if is_same and not self.teacher.ce_weight:
            raise UserError(
                "student and teacher are the same model, so there is nothing to learn",
                hint="name another model in teacher.model, or add qat:",
            )
        return folder


class EvalBatchesWithTargets(Sequence):
    """Validation batches, with the teacher's targets read when a batch is used."""

    def __init__(self, batches: list[Batch], targets: CachedTargets):
        self.batches = batches
        self.targets = targets

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> Batch:
        return self.targets(self.batches[number])
