"""The training step of a draft: the project's own, judged by what it is trained on."""

import mlx.core as mx
import mlx.nn as nn

from ..data.batches import Batch
from ..train.step import Step
from ..train.targets import Target
from .losses import overlap


class Learning(Step):
    """A `Step` whose validation loss is the loss of the training."""

    def _loss(self, *batch) -> mx.array:
        return self._loss_of(self.parameters, *batch)


def chances(model: nn.Module, lesson: Batch) -> tuple[mx.array, mx.array]:
    """Bounds [B, L] of the chance that a drawn guess stands, place by place."""
    *target, _ = lesson.target
    return overlap(model(lesson.tokens[:, :-1]), Target(*target))
