"""The preference loss of a train stage: its examples and its reference."""

from functools import cache, partial

import mlx.core as mx
import numpy as np

from ...config.train import TrainConfig
from ...data.batching import (
    Batch,
    BucketBatchSampler,
    StepSampler,
    TargetBatches,
    example_indices,
)
from ...data.preference import encode_pairs, encode_unpaired
from ...data.token_store import Encode
from ...errors import UserError
from ...models.checkpoint import weights_digest
from ...training.losses import LossModel
from ...training.preference_loss import PreferenceLoss
from ...training.reference_log_probs import (
    Reference,
    reference_log_probs,
    with_preference_target,
)
from ..context import StageContext
from .batches import loss_model
from .objective import Objective
from .qat import QATModel

# Training sequences, of which every second lends its completion.
LENT = 200


class PreferenceObjective(Objective):
    """The loss of a train stage with a `loss` block.

    The reference is the model that the stage starts from: without its adapter, before
    fake quantization, or as it is served if it is quantized. Its log-probabilities are
    computed before the training begins, if possible with the model that is trained.
    """

    def __init__(self, config: TrainConfig, context: StageContext, model: QATModel):
        super().__init__(config, context, model)
        self.loss = PreferenceLoss(config.loss)
        # Two sequences of every example.
        self.encode = encode_pairs if self.loss.is_paired else encode_unpaired

    def encode_valid(self, batches: StepSampler) -> Encode:
        if self.loss.is_paired:
            return self.encode
        # The examples are few: those of the training lend their completions.
        lent = [batches.examples[n] for n in range(len(batches.examples))[:LENT:2]]
        return partial(encode_unpaired, lent=lent)

    def training(
        self, batches: StepSampler, steps: int, compute: mx.Dtype
    ) -> TargetBatches:
        labels = batches.examples.labels
        if labels is not None and labels.any() == labels.all():
            raise UserError(
                f"all examples have the label {str(bool(labels[0])).lower()}",
                place=", ".join(self.context.data.train),
                hint="kto learns from desirable and undesirable completions",
            )
        indices = example_indices(batches, steps)
        return self._with_reference(batches, indices, compute)

    def validation(
        self, valid: BucketBatchSampler, batches: list[Batch], compute: mx.Dtype
    ) -> list[Batch]:
        used = sorted({index for batch in batches for index in batch.example_indices})
        prepared = self._with_reference(valid, np.array(used), compute)
        return [prepared.target(batch) for batch in batches]

    def _with_reference(
        self, batches: StepSampler, indices: np.ndarray, dtype: mx.Dtype
    ) -> TargetBatches:
        context, values, digest = self.context, None, ""
        if self.loss.needs_reference:
            digest = f"{weights_digest(context.initial_model)} {dtype}"
            # Loaded once for all blocks, and not kept for the training.
            reference = Reference(
                cache(self._load_reference), digest, context.logger, context.ranks
            )
            values = reference_log_probs(batches.examples, indices, reference)
        labels = batches.examples.labels
        target = partial(with_preference_target, log_probs=values, labels=labels)
        return TargetBatches(batches, digest, target)

    def _load_reference(self) -> LossModel:
        adapter, loaded = self.config.adapter, self.model.loaded
        # Latent weights lie elsewhere in the cells of their codes, and a continued
        # adapter has changed the model.
        if self.model.packed or (adapter and adapter.init_from):
            loaded = self.context.load(self.context.initial_model)
        loaded.model.eval()
        return loss_model(self.config, self.context, loaded)
