"""The contract of all losses, and how they run a model on a batch.

A loss returns a sum and the number that it is divided by. The step divides, so that
micro-batches and ranks can be combined exactly.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn

from ..data.batching import BatchArrays
from ..models.cross_entropy import cross_entropy_sum, token_log_probs
from .chunked_loss import ChunkedLoss
from .document_mask import DocumentCaches

# The summed loss, its count (float32), and the metrics [2, M]: their sums, and the
# numbers of their values.
LossSums = tuple[mx.array, mx.array, mx.array]


class LossModel:
    """A model as losses run it on a batch.

    Args:
        module: the model. Its losses have gradients while it is in training mode.
        chunked: computes the logits of some tokens at a time; None = all logits at
            once.
        document_caches: keeps attention inside the documents of packed batches; None =
            no batch is packed.
    """

    def __init__(
        self,
        module: nn.Module,
        chunked: ChunkedLoss | None = None,
        document_caches: DocumentCaches | None = None,
    ):
        self.module = module
        self.chunked = chunked
        self.document_caches = document_caches

    def sum_over_tokens(
        self, batch: BatchArrays, function: Callable[..., mx.array], *labels: mx.array
    ) -> mx.array:
        """A loss summed over the trained tokens of a batch.

        Args:
            function: the sum for logits [..., V], next tokens, mask, and `labels`.
            labels: [B, L, ...] each.
        """
        kwargs = {}
        if batch.documents is not None:
            kwargs["cache"] = self.document_caches(batch.documents)
        labels = batch.next_tokens, batch.mask, *labels
        if self.chunked is None:
            return function(self.module(batch.inputs, **kwargs), *labels)
        chunked = self.chunked if self.module.training else self.chunked.value
        return chunked(batch.inputs, labels, batch.places, loss=function, **kwargs)

    def log_probs(self, batch: BatchArrays, temperature: float = 1.0) -> mx.array:
        """Log-probabilities of the next tokens, float32 [B, L].

        Tokens that are not trained may have the value 0.

        Args:
            temperature: divides the logits.
        """
        inputs, targets = batch.inputs, batch.next_tokens
        if self.chunked is None:
            return token_log_probs(self.module(inputs), targets, temperature)
        return self.chunked.log_probs(
            inputs, targets, batch.places, temperature=temperature
        )


class Loss:
    """A loss of a model on a batch; see `LossSums`.

    Attributes:
        metric_names: of the metrics, which are summed as the loss is.
        main_metric: the one that a progress line shows; None = none.
        needs_places: whether it reads `BatchArrays.places` of every batch.
    """

    metric_names: Sequence[str] = ()
    main_metric: str | None = None
    needs_places = False

    def __call__(self, model: LossModel, batch: BatchArrays) -> LossSums:
        """The summed loss of a batch, its count and the metrics."""
        raise NotImplementedError


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
