"""The loss of a student: what its teacher predicts, mixed with the tokens alone."""

import mlx.core as mx
import mlx.nn as nn

from .distillation import divergence_sum
from .documents import DocumentCaches
from .losses import cross_entropy_sum
from .split import CannotSplit, Split
from .targets import Target, whole
from .teacher import Teacher


class LiveTeacher:
    """A model that runs beside its student.

    Args:
        model: gives logits of its own; never trained.
        caches: keep its attention inside the documents of packed batches.
    """

    def __init__(self, model: nn.Module, caches: DocumentCaches | None = None):
        self.model = model
        self.caches = caches
        model.freeze()
        model.eval()
        try:
            self._split = Split(model)
        except CannotSplit:
            self._split = None

    def look(self, inputs: mx.array, documents: mx.array | None = None) -> mx.array:
        """What `logits` are made of, [B, L, ...]: few numbers, if the model splits."""
        within = {} if documents is None else {"cache": self.caches(documents)}
        if self._split:
            return self._split.hidden(inputs, **within)
        return self.model(inputs, **within)

    def logits(self, looked: mx.array) -> mx.array:
        """Logits [..., V] of some positions [...] of what `look` gave."""
        if not self._split:
            return looked
        flat = self._split.logits(looked.reshape(-1, looked.shape[-1]))
        return flat.reshape(*looked.shape[:-1], -1)


class Taught:
    """Summed over the trained positions: the divergence from a teacher, as much as the
    cross-entropy leaves room for.

    The divergence counts times the squared temperature, which makes its gradients as
    large at any temperature (arXiv 1503.02531).

    Args:
        live: the teacher; None = batches bring its predictions along.
        confidence: see `divergence_sum`.
    """

    def __init__(
        self,
        settings: Teacher,
        live: LiveTeacher | None = None,
        confidence: float = 0.0,
    ):
        self.settings = settings
        self.live = live
        self.confidence = confidence

    def labels(
        self,
        inputs: mx.array,
        documents: mx.array | None,
        target: tuple[mx.array, ...] | None,
    ) -> tuple[mx.array, ...]:
        """What the loss needs of the teacher, [B, L, ...] each, without a gradient."""
        if self.live:
            return (mx.stop_gradient(self.live.look(inputs, documents)),)
        return target

    def __call__(
        self, logits: mx.array, targets: mx.array, mask: mx.array, *labels: mx.array
    ) -> mx.array:
        """The sum, of logits [..., V] and all others [..., ...]."""
        settings = self.settings
        shared, target = self._predicted(logits, labels)
        divergence = divergence_sum(
            shared,
            target,
            mask,
            divergence=settings.loss,
            confidence=self.confidence,
            temperature=settings.temperature,
        )
        loss = (1 - settings.cross_entropy) * settings.temperature**2 * divergence
        if settings.cross_entropy:
            plain = cross_entropy_sum(logits, targets, mask)
            loss = loss + settings.cross_entropy * plain
        return loss

    def _predicted(
        self, logits: mx.array, labels: tuple[mx.array, ...]
    ) -> tuple[mx.array, Target]:
        """The student's logits, and the target, of the tokens that both have."""
        if not self.live:
            return logits, Target(*labels)
        of_teacher = self.live.logits(*labels)
        # Models of one family may fill up the vocabulary to different sizes.
        shared = min(logits.shape[-1], of_teacher.shape[-1])
        target = whole(of_teacher[..., :shared], self.settings.temperature)
        return logits[..., :shared], target
