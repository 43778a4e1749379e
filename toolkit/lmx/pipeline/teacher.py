"""The teacher of a train stage: which model it is, and what its student gets of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np

from ..config.train import TeacherConfig
from ..data.batching import Batch, BucketBatchSampler, ExampleDataset
from ..data.packing import PackedBatchSampler
from ..data.tokenizer_files import require_same_tokenizer
from ..errors import UserError
from ..generation.completions import CachedGenerator, replace_completions
from ..models.checkpoint import config_int, read_config, weights_digest
from ..models.loader import LoadedModel, load_tokenizer
from ..training.distillation import DistillationLoss, OnlineTeacher
from ..training.document_mask import DocumentCaches
from ..training.teacher_cache import (
    CachedTargets,
    TeacherClient,
    cache_teacher_targets,
    teacher_confidence,
)
from .context import StageContext

# What its kept predictions depend on.
KEPT = ("top_k", "temperature")


class TeacherSetup:
    """The teacher that a train stage names, loaded when it is first needed.

    Args:
        student: the model that is trained.
        moves: whether the student differs from the model it starts from.

    Raises:
        UserError: there is no such teacher, it has another tokenizer, or nothing to
            teach.
    """

    def __init__(
        self,
        teacher: TeacherConfig,
        context: StageContext,
        student: LoadedModel,
        *,
        moves: bool,
    ):
        self.teacher = teacher
        self.context = context
        self.student = student
        self.folder = self._folder(moves)
        self._require_same_tokens()

    @cached_property
    def digest(self) -> str:
        """A hash of the teacher's weights and of what makes a model of them."""
        return weights_digest(self.folder)

    @cached_property
    def live(self) -> OnlineTeacher:
        """The teacher in memory."""
        self.context.logger.info(f"the teacher: {self.folder}")
        return OnlineTeacher(self.context.load(self.folder).model)

    @cached_property
    def source(self) -> TeacherClient:
        """What is asked for predictions that are kept."""
        logger = self.context.logger
        configs = (read_config(self.folder), self.student.config)
        known = filter(None, (config_int(config, "vocab_size") for config in configs))
        vocabulary = min(known, default=len(self.student.tokenizer.get_vocab()))
        return TeacherClient(
            lambda: self.live, self.digest, vocabulary, logger.info, logger.warning
        )

    def answered(self, examples: ExampleDataset) -> ExampleDataset:
        """The examples, or the teacher's own answers to them if that is asked for."""
        settings, context = self.teacher.sequence_level, self.context
        if settings is None:
            return examples
        answerer = CachedGenerator(
            lambda: self.live.model,
            self.digest,
            frozenset(self.student.tokenizer.eos_token_ids),
            context.logger.info,
            context.logger.warning,
        )
        return replace_completions(
            examples,
            answerer,
            temperatures=settings.temperatures,
            max_tokens=settings.max_tokens,
            max_seq_length=context.data.max_seq_length,
            seed=context.seed,
        )

    def keep_apart(self) -> None:
        """Be ready for rows of several documents.

        Raises:
            CannotPack: the teacher does not keep them apart.
        """
        if not self.teacher.offline:
            self.live.document_caches = DocumentCaches(self.live.model)

    def prepare(
        self, batches: BucketBatchSampler | PackedBatchSampler, total: int
    ) -> tuple[DistillationLoss, "BatchesWithTargets"]:
        """The loss, and the batches that it wants.

        Args:
            total: batches that will be trained on.

        Raises:
            UserError: the disk is too small for what is to be kept.
        """
        teacher, share = self.teacher, 0.0
        wanted = _wanted(batches, total)
        if teacher.loss == "cakld":
            share = teacher_confidence(batches.examples, wanted, self.source)
            self.context.logger.info(f"confidence of the teacher: {share:.3f}")
        if teacher.offline:
            targets = self._kept(batches.examples, wanted)
            taught = DistillationLoss(teacher, confidence=share)
            return taught, BatchesWithTargets(batches, self.digest, targets)
        return DistillationLoss(teacher, self.live, share), BatchesWithTargets(
            batches, self.digest
        )

    def held_out(
        self, examples: ExampleDataset, batches: list[Batch]
    ) -> Sequence[Batch]:
        """Batches of examples that are not trained on, as the loss wants them.

        Raises:
            UserError: the disk is too small for what is to be kept.
        """
        if not self.teacher.offline:
            return batches
        wanted = {member for batch in batches for member in batch.example_indices}
        return EvalBatchesWithTargets(
            batches, self._kept(examples, np.array(sorted(wanted)))
        )

    def _kept(self, examples: ExampleDataset, wanted: np.ndarray) -> CachedTargets:
        settings = {name: getattr(self.teacher, name) for name in KEPT}
        return cache_teacher_targets(examples, wanted, self.source, **settings)

    def _folder(self, moves: bool) -> Path:
        named, context = self.teacher.model, self.context
        if named is not None:
            return context.resolve(named).absolute()
        if context.current is None:
            raise UserError(
                "a fresh model has nothing to teach itself",
                hint="name another one in teacher.model",
            )
        folder = context.require_visible(context.current.reference)
        if "quantization" in read_config(folder):
            raise UserError(
                "this model came quantized, so its full-precision base is not known",
                place=str(folder),
                hint="name it in teacher.model",
            )
        if folder == context.initial_model and not moves and not self.teacher.ce_weight:
            raise UserError(
                "student and teacher are the same model, so there is nothing to learn",
                hint="name another one in teacher.model, or add quantization:",
            )
        return folder

    def _require_same_tokens(self) -> None:
        trust = self.context.source.trust_remote_code
        other = load_tokenizer(self.folder, trust_remote_code=trust)
        own, place = self.student.tokenizer, str(self.folder)
        require_same_tokenizer(own, other, role="teacher", place=place)


@dataclass(frozen=True)
class BatchesWithTargets:
    """Batches of a teacher, and what it predicts for them if that was kept."""

    batches: BucketBatchSampler | PackedBatchSampler
    teacher: str
    targets: CachedTargets | None = None

    def __call__(self, step: int) -> Batch:
        """The batch of a step, counted from 0."""
        batch = self.batches(step)
        return self.targets(batch) if self.targets else batch

    @property
    def examples(self) -> ExampleDataset:
        """What is trained on."""
        return self.batches.examples

    @property
    def per_epoch(self) -> int:
        """Batches in one pass over the examples."""
        return self.batches.per_epoch

    @property
    def digest(self) -> str:
        """A hash of the examples and the teacher, to tell whether they have changed."""
        return sha256(f"{self.batches.digest} {self.teacher}".encode()).hexdigest()


class EvalBatchesWithTargets(Sequence):
    """Batches, each with what a teacher predicts for it once it is asked for."""

    def __init__(self, batches: list[Batch], targets: CachedTargets):
        self.batches = batches
        self.targets = targets

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> Batch:
        return self.targets(self.batches[number])


def _wanted(batches: BucketBatchSampler | PackedBatchSampler, total: int) -> np.ndarray:
    """The numbers of the examples in the first batches, that many."""
    if total >= batches.per_epoch:
        return np.arange(len(batches.examples))
    found = {member for n in range(total) for member in batches(n).example_indices}
    return np.array(sorted(found))
