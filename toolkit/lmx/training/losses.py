"""The contract of all losses, and how they run a model on a batch.

A loss returns a sum and the number that it is divided by. The step divides, so that
micro-batches and ranks can be combined exactly.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn

from ..data.batching import BatchArrays
from ..models.cross_entropy import cross_entropy_sum, token_log_probs
from .document_mask import DocumentCaches

# The summed loss, its count (float32), and the metrics [2, M]: their sums, and the
# numbers of their values.
LossSums = tuple[mx.array, mx.array, mx.array]


class LossModel:
    """A model as losses run it on a batch, with all logits at once.

    Args:
        module: the model. Its losses have gradients while it is in training mode.

    Attributes:
        document_caches: keeps attention inside the documents of packed batches; None =
            no batch is packed.
        uses_places: whether `BatchArrays.places` makes a difference.
    """

    document_caches: DocumentCaches | None = None
    uses_places = False

    def __init__(self, module: nn.Module):
        self.module = module

    def sum_over_tokens(
        self, batch: BatchArrays, function: Callable[..., mx.array], *labels: mx.array
    ) -> mx.array:
        """A loss summed over the trained tokens of a batch.

        Args:
            function: the sum for logits [..., V], next tokens, mask, and `labels`.
            labels: [B, L, ...] each.
        """
        logits = self.module(batch.inputs, **self._masks(batch))
        return function(logits, batch.next_tokens, batch.mask, *labels)

    def log_probs(self, batch: BatchArrays, temperature: float = 1.0) -> mx.array:
        """Log-probabilities of the next tokens, float32 [B, L].

        Tokens that are not trained may have the value 0.

        Args:
            temperature: divides the logits.
        """
        logits = self.module(batch.inputs)
        return token_log_probs(logits, batch.next_tokens, temperature)

    def _masks(self, batch: BatchArrays) -> dict:
        """Keyword arguments of the model that keep packed documents apart."""
        if batch.documents is None:
            return {}
        return {"cache": self.document_caches(batch.documents)}


class Loss(ABC):
    """A loss of a model on a batch; see `LossSums`.

    Attributes:
        metric_names: of the metrics, which are summed as the loss is.
        main_metric: the one that a progress line shows; None = none.
        needs_places: whether it reads `BatchArrays.places` of every batch.
    """

    metric_names: Sequence[str] = ()
    main_metric: str | None = None
    needs_places = False

    @abstractmethod
    def __call__(self, model: LossModel, batch: BatchArrays) -> LossSums:
        """The summed loss of a batch, its count and the metrics."""


class TokenLoss(Loss):
    """A loss summed over the trained tokens, which are its count.

    Args:
        from_logits: the sum for logits [..., V], next tokens int [...] and mask
            bool [...], such as `cross_entropy_sum`.
    """

    def __init__(self, from_logits: Callable[..., mx.array] = cross_entropy_sum):
        self.from_logits = from_logits

    def labels(self, batch: BatchArrays) -> tuple[mx.array, ...]:
        """More arguments of `from_logits`, [B, L, ...] each."""
        return ()

    def __call__(self, model: LossModel, batch: BatchArrays) -> LossSums:
        """The summed loss, the number of trained tokens, and no metrics."""
        loss = model.sum_over_tokens(batch, self.from_logits, *self.labels(batch))
        # mx.compile fails on an output if something else is computed alike, such as the
        # step's tokens, or a sum of the mask in a user's loss.
        return loss, mx.where(batch.mask, 1.0, 0.0).sum(), mx.zeros((2, 0))
