"""The training step of a draft: the project's own, with another loss."""

import mlx.core as mx
import mlx.nn as nn

from ..train.step import Step
from ..train.targets import Target
from .law import law, overlap
from .losses import loss_sum
from .targets import Lesson


class Learning(Step):
    """Trains a student on lessons.

    Args:
        losses: those of `losses.loss_sum`.
        settings: those of `Step`.
    """

    def __init__(self, model: nn.Module, *, losses: dict, **settings):
        self._losses = losses
        super().__init__(model, **settings)

    def _given(self, batch: Lesson) -> tuple:
        # Rows hold one answer each, so the place of documents is free.
        tokens, mask, _, *others = super()._given(batch)
        return tokens, mask, tuple(batch.target), *others

    def _loss(self, *batch) -> mx.array:
        return self._loss_of(self.parameters, *batch)

    def _loss_of(self, parameters, tokens, mask, target, *_) -> mx.array:
        self._set(parameters)
        logits = self.model(tokens[:, :-1])
        target = Target(*target)
        return loss_sum(logits, tokens[:, 1:], target, mask, **self._losses)


def chances(model: nn.Module, lesson: Lesson) -> tuple[mx.array, mx.array]:
    """Bounds [B, L] of the chance that a drawn guess stands, place by place."""
    logits = model(lesson.tokens[:, :-1])
    return overlap(law(logits, lesson.target), lesson.target)
