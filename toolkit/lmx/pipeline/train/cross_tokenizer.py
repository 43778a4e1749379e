"""A teacher of a train stage whose tokenizer is not the student's."""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...config.train import TeacherConfig
from ...data import cache, fingerprint
from ...data.batching import ExampleDataset
from ...data.record_formats import DataRecord
from ...data.token_alignment import Aligner
from ...data.token_bytes import TokenBytes
from ...data.token_store import MAX_LOGGED
from ...errors import UserError
from ...models.checkpoint import config_int, read_config
from ...models.loader import LoadedModel
from ...training.mapped_targets import MappedTeacher
from ...training.token_mapping import TokenMapping
from ..context import StageContext


class CrossTokenizer:
    """Maps the teacher's predictions to the student's tokens.

    Args:
        folder, tokenizer: of the teacher.
        difference: between the tokenizers.

    Raises:
        UserError: the recipe asks for what needs one tokenizer, or the tokens of one of
            the models are no bytes.
    """

    def __init__(
        self,
        teacher: TeacherConfig,
        context: StageContext,
        student: LoadedModel,
        folder: Path,
        tokenizer: Any,
        difference: str,
    ):
        self.context = context
        self.student = student
        self.folder = folder
        needs_own, problem = "needs a teacher with the model's own tokenizer", None
        if teacher.sequence_level:
            problem = f"sequence_level {needs_own}"
            hint = "remove sequence_level, or name another teacher"
        elif not teacher.offline:
            problem = (
                "the predictions of a teacher with another tokenizer must be stored"
            )
            hint = "add offline: true; rollouts need the model's own tokenizer"
        elif teacher.loss != "forward_kl":
            problem = f"{teacher.loss} {needs_own}"
            hint = "use loss: forward_kl"
        if problem:
            message = f"the teacher has {difference}; {problem}"
            raise UserError(message, place=str(folder), hint=hint)
        self.vocabulary = TokenBytes(student.tokenizer, place=str(student.path))
        self.teacher_vocabulary = TokenBytes(tokenizer, place=str(folder))
        shared = set(self.vocabulary.pieces) & set(self.teacher_vocabulary.pieces)
        count = len(set(self.vocabulary.pieces))
        context.logger.info(
            f"the teacher has {difference}: its predictions are mapped; it has "
            f"{len(shared) / count:.1%} of the model's tokens"
        )

    @cached_property
    def digest(self) -> str:
        """Hash of both tokenizers."""
        folders = (self.student.path, self.folder)
        return cache.key_of([fingerprint.tokenizer(folder) for folder in folders])

    @cached_property
    def mapping(self) -> TokenMapping:
        """From the teacher's tokens to the student's."""
        ours, theirs = self.vocabulary, self.teacher_vocabulary
        sizes = [
            config_int(config, "vocab_size") or len(vocabulary.pieces)
            for config, vocabulary in (
                (self.student.config, ours),
                (read_config(self.folder), theirs),
            )
        ]
        return TokenMapping(ours, theirs, *sizes)

    def align(
        self,
        examples: ExampleDataset,
        members: np.ndarray,
        records: Iterable[DataRecord],
    ) -> MappedTeacher:
        """The teacher's tokens of some examples.

        Args:
            members: the indices of the examples.
            records: all records of the examples.

        Raises:
            UserError: no trained token has a place in the teacher's text.
        """
        data = self.context.data
        aligner = Aligner(
            self.vocabulary,
            self.teacher_vocabulary,
            max_seq_length=data.max_seq_length,
            loss_on=data.loss_on,
        )
        sides, stats = aligner.align(examples, members, records)
        failed, logger, count = stats.failed, self.context.logger, len(members)
        if not stats.placed:
            where, reason = failed[0]
            raise UserError(
                f"the teacher's text cannot be aligned with any of {count:,} "
                f"examples; the first: {reason}",
                place=where,
                hint="choose a teacher that renders the same messages",
            )
        for where, reason in failed[:MAX_LOGGED]:
            logger.warning(f"{where}: not aligned, learns its labels: {reason}")
        if len(failed) > MAX_LOGGED:
            logger.warning(
                f"{len(failed):,} of {count:,} examples are not aligned and learn "
                "their labels"
            )
        rest = stats.trained - stats.placed
        logger.info(
            f"the teacher predicts {stats.placed / stats.trained:.1%} of "
            f"{stats.trained:,} trained tokens, {stats.same / stats.trained:.1%} as "
            f"one token of its own; {rest:,} learn their labels"
        )
        return MappedTeacher(
            self.mapping, dict(zip(map(int, members), sides, strict=True))
        )
