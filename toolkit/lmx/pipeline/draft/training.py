"""Distillation of a draft model, and of a drafter on hidden states."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ...config.train import loss_chunk
from ...cpu import on_cpu
from ...draft.candidates import DrafterCandidate, ModelCandidate
from ...draft.cost_model import SpeculationCosts
from ...draft.dataset import DistillationBatches
from ...draft.hidden_states import HiddenStateBatches, HiddenStateRecorder
from ...draft.losses import DrafterLoss, DraftLoss, acceptance_bounds
from ...files.atomic import atomic_folder
from ...models.blockwise import NoTrunkHeadSplit
from ...models.checkpoint import config_int
from ...models.drafters.base import Drafter
from ...models.drafters.io import ARCHITECTURES, bind_target, save_drafter
from ...models.hooks import require_hidden_states
from ...run.parallel_dims import ParallelDims
from ...training.chunked_loss import ChunkedLossModel
from ...training.losses import LossModel
from ...training.trainer import Trainer
from ..context import MODELS, ModelArtifact, write_model
from ..quantize.stage import QuantizeStage
from .benchmark import draft_costs, load_draft, publish_draft
from .distillation import DraftDistillation, References
from .setup import INITIAL, write_initial

# Tokens on which the importance of blocks is measured.
IMPORTANCE_TOKENS = 256


class DraftModelDistillation(DraftDistillation):
    """Makes the draft model of one draft stage."""

    def cache_targets(self) -> None:
        self.data.eval_batches.cache_targets()
        self.data.train_batches.cache_targets()
        if self.data.text_batches:
            self.data.text_batches.cache_targets()

    def prepare(self) -> None:
        """Write the initial draft model."""
        tokens = [batch.tokens.reshape(-1) for batch in self.data.eval_batches]
        sample = mx.concatenate(tokens)[None, :IMPORTANCE_TOKENS]
        config = self.config.draft_model
        initial = write_initial(config, self.context, self.target, sample)
        self._costs = self._folder_costs(initial)

    def make_trainer(self) -> Trainer:
        context = self.context
        initial = context.require_visible(context.artifacts.folder(MODELS, INITIAL))
        self._initial = loaded = context.load(initial, compute="stored")
        chunk = loss_chunk(config_int(loaded.config, "vocab_size"), on_cpu=on_cpu())
        try:
            loss_model = ChunkedLossModel(loaded.model, chunk)
        except NoTrunkHeadSplit:
            loss_model = LossModel(loaded.model)
        make_step = partial(
            self.make_step,
            loaded.model,
            loaded.dtype,
            loss=DraftLoss(cross_entropy=self.config.ce_weight),
            loss_model=loss_model,
        )
        parts = self.data.with_text(lambda batches: batches)
        return self.trainer(make_step, parts, self.data.eval_batches)

    def finish(self, trainer: Trainer, loss: float) -> ModelArtifact:
        context, model = self.context, trainer.step.materialize()
        facts = self.facts(trainer, loss, model)
        weights = dict(tree_flatten(model.parameters()))
        weights = {k: v.astype(self._initial.dtype) for k, v in weights.items()}
        facts["parameters"] = sum(value.size for value in weights.values())
        draft = trained = context.folder / "dense"
        write_model(trained, self._initial, weights)
        if self.config.quantization:
            folder = context.folder / "quantization"
            folder.mkdir(exist_ok=True)
            current = ModelArtifact(trained, trained)
            # The other ranks wait for this one.
            alone = replace(
                context, folder=folder, current=current, parallel=ParallelDims()
            )
            draft = QuantizeStage(self.config.quantization).run(alone).model
            costs = self._folder_costs(draft)
            quantized = context.load(draft).model
            predicted = self._predict(quantized, costs, self.data.references)
            context.logger.info(f"quantized: {self.summary(predicted)}")
            facts |= {"before_quantizing": facts["expected"], "expected": predicted}
        return publish_draft(self.data, draft, load_draft(self.data, draft), facts)

    def _folder_costs(self, folder: Path) -> SpeculationCosts:
        """Costs of the target and of the model in a folder, as they are served."""
        candidate = ModelCandidate(self.context.load(folder).model)
        return draft_costs(self.data, candidate)

    def _predict(self, model, costs: SpeculationCosts, references: References) -> dict:
        """Acceptance on held-out completions, and the speed-up that it predicts."""
        low = high = count = 0.0
        for batch in self.data.eval_batches:
            mask = np.array(batch.mask)
            lower, upper = map(np.array, acceptance_bounds(model, batch))
            low, high = low + lower[mask].sum(), high + upper[mask].sum()
            count += mask.sum()
        bounds = {
            "acceptance_lower_bound": float(low / count),
            "acceptance_upper_bound": float(high / count),
        }
        return bounds | self.predict(ModelCandidate(model), costs, references)

    def predicted(self, model: nn.Module, references: References) -> dict:
        return self._predict(model, self._costs, references)

    def summary(self, predicted: dict) -> str:
        return (
            "sampled acceptance rate between "
            f"{predicted['acceptance_lower_bound']:.1%} and "
            f"{predicted['acceptance_upper_bound']:.1%}; " + super().summary(predicted)
        )


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
            self._costs = draft_costs(self.data, self._candidate(drafter))
        chunk = loss_chunk(drafter.draft_vocab_size, on_cpu=on_cpu())
        loss = DrafterLoss(self.config, chunk=chunk)
        return self.trainer(
            partial(self.make_step, drafter, self.target.dtype, loss=loss),
            self.data.with_text(self._batches),
            self._batches(self.data.eval_batches),
        )

    def predicted(self, model: Drafter, references: References) -> dict:
        return self.predict(self._candidate(model), self._costs, references)

    def finish(self, trainer: Trainer, loss: float) -> ModelArtifact:
        drafter = trainer.step.materialize()
        facts = {"parameters": self._num_parameters}
        facts |= self.facts(trainer, loss, drafter)
        folder = self.context.folder / "drafter"
        with atomic_folder(folder) as partial:
            save_drafter(partial, drafter, self.target.dtype)
        return publish_draft(self.data, folder, self._candidate(drafter), facts)

    def _make_drafter(self) -> Drafter:
        """A drafter with random weights, for the current model."""
        target, place = self.target, str(self.target.path)
        cls = ARCHITECTURES[self.config.architecture]
        num_blocks = len(target.model.layers)
        # The first block is there in every model; more are checked with the drafter.
        width = require_hidden_states(target.model, (0,), place=place)
        vocab_size = target.model(mx.zeros((1, 1), mx.int32)).shape[-1]
        # The mask is the padding token, or an end-of-sequence token.
        mask = getattr(target.tokenizer, "pad_token_id", None)
        if mask is None:
            mask = min(target.tokenizer.eos_token_ids)
        mx.random.seed(self.context.seed)
        drafter = cls.for_target(
            target.config,
            self.config.drafter,
            width=width,
            vocab_size=vocab_size,
            num_blocks=num_blocks,
            mask_token_id=mask,
        )
        # One forward pass gives the predictions and the hidden states.
        self.data.teacher = HiddenStateRecorder(target.model, drafter.layer_ids)
        self._hidden_size = drafter.config.hidden_size
        drafter.choose_vocabulary(self.data.token_counts(vocab_size))
        bind_target(drafter, target.model, place=place)
        drafter.initialize()
        return drafter

    def _batches(self, batches: DistillationBatches) -> HiddenStateBatches:
        return HiddenStateBatches(
            batches,
            self.data.teacher,
            width=self._hidden_size,
            key=self.digest,
            max_bytes=1e9 * self.config.data_generation.max_hidden_states_gb,
            logger=self.context.logger,
        )

    def _candidate(self, drafter: Drafter) -> DrafterCandidate:
        return DrafterCandidate(drafter, self.target.model)
