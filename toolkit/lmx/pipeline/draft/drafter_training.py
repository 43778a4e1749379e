"""Distillation of a drafter on hidden states: eagle3 and dflash."""

from functools import cached_property
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from ...config.draft import DrafterConfig
from ...config.train import loss_chunk
from ...cpu import on_cpu
from ...draft.candidates import DrafterCandidate
from ...draft.hidden_states import HiddenStateBatches, HiddenStateRecorder
from ...draft.losses import DrafterLoss
from ...models.drafters.base import Drafter
from ...models.drafters.io import ARCHITECTURES, bind_target, save_drafter
from ...models.hooks import require_hidden_states
from ...models.loader import set_compute_dtype
from ...run.fs import atomic_folder
from ...training.optimizers import OptimizerConfig
from ...training.step import TrainStep
from ...training.trainer import Trainer
from ..context import ModelArtifact
from ..estimate import training_dtype
from .distillation import DraftDistillation


class DrafterDistillation(DraftDistillation):
    """Makes the drafter of one draft stage."""

    def make_trainer(self) -> Trainer:
        drafter, ranks = self._make_drafter(), self.context.ranks
        trained = tree_flatten(drafter.trainable_parameters())
        self._num_parameters = sum(value.size for _, value in trained)
        self.context.logger.info(
            f"{self.config.architecture} drafter: {self._num_parameters:,} weights, "
            "reads the outputs of blocks "
            f"{', '.join(map(str, drafter.layer_ids))}"
        )
        if ranks.is_first:
            self._costs = self.evaluation.costs(self._candidate(drafter))
        return self.trainer(
            self._make_step(drafter),
            self._batches(self.data.train_batches, drafter),
            self._batches(self.data.eval_batches, drafter),
        )

    def predicted(self, model: Drafter) -> dict:
        return self.predict(self._candidate(model), self._costs)

    def finish(self, trainer: Trainer, loss: float) -> ModelArtifact:
        drafter = trainer.step.materialize()
        facts = {"parameters": self._num_parameters}
        facts |= self.facts(trainer, loss, drafter)
        folder = self._save(drafter)
        return self.evaluation.run(folder, self._candidate(drafter), facts)

    def _make_drafter(self) -> Drafter:
        """A drafter with random weights, for the current model."""
        target, place = self.target, str(self.target.path)
        cls = ARCHITECTURES[self.config.architecture]
        num_blocks = len(target.model.layers)
        # The first block is there in every model; more are checked with the drafter.
        width = require_hidden_states(target.model, (0,), place=place)
        vocab_size = target.model(mx.zeros((1, 1), mx.int32)).shape[-1]
        mx.random.seed(self.context.seed)
        drafter = cls.for_target(
            target.config,
            self._drafter_config,
            width=width,
            vocab_size=vocab_size,
            num_blocks=num_blocks,
        )
        # One forward pass gives the predictions and the hidden states.
        self.data.teacher = HiddenStateRecorder(target.model, drafter.layer_ids)
        drafter.choose_vocabulary(self.data.train_batches.token_counts(vocab_size))
        bind_target(drafter, target.model, place=place)
        drafter.initialize()
        return drafter

    @cached_property
    def _drafter_config(self) -> DrafterConfig:
        config, tokenizer = self.config.drafter, self.target.tokenizer
        if config.mask_token_id is not None:
            return config
        mask = getattr(tokenizer, "pad_token_id", None)
        if mask is None:
            mask = min(tokenizer.eos_token_ids)
        return config.model_copy(update={"mask_token_id": mask})

    def _make_step(self, drafter: Drafter) -> TrainStep:
        compute = training_dtype("auto", self.target.dtype)
        chunk = loss_chunk(drafter.draft_vocab_size, on_cpu=on_cpu())
        step = TrainStep(
            drafter,
            OptimizerConfig(max_grad_norm=1.0),
            compute_dtype=compute,
            loss=DrafterLoss(self.config, chunk=chunk),
            ranks=self.context.ranks,
        )
        set_compute_dtype(drafter, compute)
        return step

    def _batches(self, batches, drafter: Drafter) -> HiddenStateBatches:
        return HiddenStateBatches(
            batches,
            self.data.teacher,
            width=drafter.config.hidden_size,
            key=self.digest,
            max_bytes=1e9 * self.config.data_generation.max_hidden_states_gb,
            logger=self.context.logger,
        )

    def _candidate(self, drafter: Drafter) -> DrafterCandidate:
        return DrafterCandidate(drafter, self.target.model)

    def _save(self, drafter: Drafter) -> Path:
        folder = self.context.folder / "drafter"
        with atomic_folder(folder) as partial:
            save_drafter(partial, drafter, self.target.dtype)
        return folder
