"""Losses that maximize the acceptance rate of draft models and drafters.

Like the divergences of `training.distillation`, they compare the target's top-k tokens
and treat all other tokens as one outcome. So they are lower bounds of the divergences
over the whole vocabulary.
"""

from functools import partial

import mlx.core as mx
import mlx.nn as nn

from ..config.draft import DraftConfig
from ..data.batching import Batch, BatchArrays
from ..models.cross_entropy import cross_entropy_sum
from ..models.drafters.base import MIN_LOGIT, Drafter, TrainingRounds
from ..training.distillation import (
    DIVERGENCES,
    TopKDistribution,
    divergence_sum,
    student_distribution,
    teacher_distribution,
)
from ..training.losses import Loss, LossModel, LossSums, TokenLoss
from ..training.teacher_targets import TeacherTarget

# How early `adaptive_kl_tv` moves to total variation.
ETA = 3.0
# Lowest log-probability of all tokens of a target that a drafter can draft.
MIN_COVERED = -20.0
# Weight of a drafter's token in the loss, relative to the one before it.
POSITION_DECAY = 0.8


def adaptive_kl_tv(
    teacher: TopKDistribution, student: TopKDistribution
) -> tuple[mx.array, mx.array]:
    """Moves from forward KL to total variation as the acceptance rate rises.

    lambda KL + (1 - lambda) TV with lambda = exp(-eta alpha) (arXiv 2602.23881). Here
    alpha is computed per position, so that the loss does not depend on the batch.
    """
    overlap = mx.minimum(teacher.probs, student.probs)
    weight = mx.exp(-ETA * overlap.sum(axis=-1, keepdims=True))
    # Terms of 1 - sum min(p, q), the rejection rate, and their gradients.
    rejected = mx.maximum(teacher.probs - student.probs, 0.0)
    variation = rejected, mx.where(rejected > 0, -student.probs, 0.0)
    pairs = zip(DIVERGENCES["forward_kl"](teacher, student), variation, strict=True)
    losses, gradients = (weight * k + (1 - weight) * t for k, t in pairs)
    return losses, gradients


class DraftLoss(TokenLoss):
    """The loss of a draft model, summed over trainable positions.

    Args:
        cross_entropy: weight of the cross-entropy. `adaptive_kl_tv` has the remaining
            weight.
    """

    def __init__(self, *, cross_entropy: float = 0.0):
        self.cross_entropy = cross_entropy

    def labels(self, batch: BatchArrays) -> tuple[mx.array, ...]:
        """The arrays of a batch's target: its top-k distribution, or all log-probs."""
        return tuple(part for part in batch.target if part is not None)

    def from_logits(
        self, logits: mx.array, tokens: mx.array, mask: mx.array, *labels: mx.array
    ) -> mx.array:
        """The loss sum in nats of logits [..., V], with `labels` of equal positions."""
        target = _teacher_target(labels)
        shared = _predicted_logits(logits, target)
        loss = divergence_sum(shared, target, mask, divergence=adaptive_kl_tv)
        loss = (1 - self.cross_entropy) * loss
        if self.cross_entropy:
            ce = cross_entropy_sum(logits, tokens, mask)
            loss = loss + self.cross_entropy * ce
        return loss


def distribution_overlap(
    logits: mx.array, target: TeacherTarget
) -> tuple[mx.array, mx.array]:
    """Lower and upper bounds [...] of the acceptance rate sum min(p, q).

    The tokens outside the target's top k overlap by at least 0 and at most the smaller
    of both remaining probabilities. Without top k, both bounds are exact.
    """
    logits = logits.astype(mx.float32)
    student, _ = student_distribution(logits, target.indices)
    overlap = mx.minimum(teacher_distribution(target).probs, student.probs)
    upper = overlap.sum(axis=-1)
    return (upper if target.log_tail is None else upper - overlap[..., -1]), upper


def acceptance_bounds(model: nn.Module, batch: Batch) -> tuple[mx.array, mx.array]:
    """Bounds [B, L] of the acceptance rate of sampled draft tokens, by position."""
    target = TeacherTarget(*batch.target)
    logits = _predicted_logits(model(batch.tokens[:, :-1]), target)
    return distribution_overlap(logits, target)


def _predicted_logits(logits: mx.array, target: TeacherTarget) -> mx.array:
    """Logits of the tokens that the target predicts; the draft model may have more."""
    if target.indices is not None:
        return logits
    return logits[..., : target.log_probs.shape[-1]]


def _teacher_target(parts: tuple[mx.array, ...]) -> TeacherTarget:
    """A target of its arrays: of the top k tokens, or of the whole vocabulary."""
    if len(parts) == 1:
        return TeacherTarget(None, *parts, None)
    return TeacherTarget(*parts)


class DraftVocabulary:
    """Translates tokens and targets to the draft ids of a drafter.

    All tokens that it cannot draft get the id after the last one. With `pad`, the
    logits have a column for it whose probability is 0.
    """

    def __init__(self, drafter: Drafter):
        self._ids = drafter.draft_ids
        if self._ids is not None:
            # One draft id more: the number of tokens that have one.
            self.size = drafter.draft_vocab_size
            self._tokens = drafter.target_tokens(mx.arange(self.size))

    def pad(self, logits: mx.array) -> mx.array:
        """Logits [..., N] with the column of tokens without a draft id."""
        if self._ids is None:
            return logits
        widths = [(0, 0)] * (logits.ndim - 1) + [(0, 1)]
        return mx.pad(logits, widths, constant_values=MIN_LOGIT)

    def ids_of(self, tokens: mx.array) -> mx.array:
        """The draft ids of tokens, int [...]."""
        return tokens if self._ids is None else self._ids[tokens]

    def is_known(self, ids: mx.array) -> mx.array:
        """Where draft ids are those of a token that can be drafted, bool [...]."""
        if self._ids is None:
            return mx.ones(ids.shape, mx.bool_)
        return ids < self.size

    def translate(self, target: TeacherTarget) -> TeacherTarget:
        """The target by draft id; tokens without one count as not covered."""
        if self._ids is None:
            return target
        if target.indices is not None:
            return target._replace(indices=self._ids[target.indices])
        log_probs = target.log_probs[..., self._tokens]
        widths = [(0, 0)] * (log_probs.ndim - 1) + [(0, 1)]
        return target._replace(
            log_probs=mx.pad(log_probs, widths, constant_values=-mx.inf)
        )

    def restrict(self, target: TeacherTarget) -> TeacherTarget:
        """A translated target whose covered probabilities sum to one."""
        if self._ids is None:
            return target
        log_probs = target.log_probs
        if target.indices is not None:
            log_probs = mx.where(target.indices < self.size, log_probs, -mx.inf)
        total = mx.logsumexp(log_probs, axis=-1)
        if target.log_tail is not None:
            total = mx.logaddexp(total, target.log_tail)
        total = mx.maximum(total, MIN_COVERED)
        tail = None if target.log_tail is None else target.log_tail - total
        return TeacherTarget(target.indices, log_probs - total[..., None], tail)


class DrafterLoss(Loss):
    """Weighted sum of the losses of draft tokens 1 to K.

    Draft token j has the weight `POSITION_DECAY`^(j - 1), as in arXiv 2503.01840: a
    later one is used only if all before it are accepted. The sum of the weights is the
    count that the loss is divided by.

    Args:
        config: of the draft stage.
        chunk: draft tokens whose logits exist at once.

    Attributes:
        metric_names: of the acceptance rates of sampled draft tokens by position, given
            that all before are accepted; upper bounds, see `distribution_overlap`.
    """

    main_metric, needs_places = "acceptance_1", True

    def __init__(self, config: DraftConfig, *, chunk: int):
        self.num_draft_tokens = config.drafter.num_draft_tokens
        self.cross_entropy = config.ce_weight
        self.chunk = chunk
        self.metric_names = [
            f"acceptance_{position + 1}" for position in range(self.num_draft_tokens)
        ]

    def __call__(self, model: LossModel, batch: BatchArrays) -> LossSums:
        """The loss sum in nats, the sum of weights, and the metrics [2, K].

        Args:
            batch: as many places as there are rounds that are trained, or more. Its
                target is the parts of a `TeacherTarget`, then the hidden states of the
                first L tokens.
        """
        drafter, mask = model.module, batch.mask
        *teacher, states = batch.target
        labels = [batch.next_tokens, *teacher]
        rounds = drafter.training_rounds(
            batch.tokens, states, mask, self.num_draft_tokens
        )
        parts = [
            self._round_sums(drafter, part, mask, labels, batch.places)
            for part in rounds
        ]
        losses, overlaps, counts = mx.concatenate(parts, axis=1)
        weights = mx.array(
            [
                part.weight * POSITION_DECAY ** (part.first + j)
                for part in rounds
                for j in range(part.hidden.shape[2])
            ]
        )
        metrics = mx.stack([overlaps, counts])
        return (weights * losses).sum(), (weights * counts).sum(), metrics

    def _round_sums(
        self,
        model: Drafter,
        rounds: TrainingRounds,
        mask: mx.array,
        labels: list[mx.array],
        places: mx.array | None,
    ) -> mx.array:
        """Losses, overlaps and valid draft tokens of some rounds by position, summed,
        [3, K]."""
        count = rounds.first + rounds.hidden.shape[2]
        columns = draft_positions(mask, rounds.starts, count)
        columns = [column[:, rounds.first :] for column in columns]
        columns.append(rounds.hidden.flatten(0, 1))
        if places is not None and len(places) < len(columns[0]):
            # All rounds with a valid token are among these.
            order = mx.argsort(~columns[1][:, 0])[: len(places)]
            columns = [column[order] for column in columns]
        positions, valid, hidden = columns
        labels = [label.flatten(0, 1)[positions] for label in labels]
        rows = max(1, self.chunk // hidden.shape[1])
        parts = []
        for start in range(0, len(hidden), rows):
            labels_of_chunk = [x[start : start + rows] for x in (valid, *labels)]
            # The gradient is that of the first argument and of the weights alone.
            chunk_sums = partial(self._chunk_sums, model, labels_of_chunk)
            if len(hidden) > rows:
                # The logits of a chunk are computed again for its gradient.
                chunk_sums = nn.utils.checkpoint(model, chunk_sums)
            parts.append(chunk_sums(hidden[start : start + rows]))
        return mx.stack(parts).sum(axis=0)

    def _chunk_sums(self, model: Drafter, labels: list, hidden: mx.array) -> mx.array:
        valid, tokens, *teacher = labels
        vocabulary = DraftVocabulary(model)
        logits = vocabulary.pad(model.head(hidden).astype(mx.float32))
        tokens = vocabulary.ids_of(tokens)
        target = vocabulary.translate(_teacher_target(teacher))
        positions = []
        for j in range(valid.shape[1]):
            parts = (part if part is None else part[:, j] for part in target)
            own, predicted, mask = TeacherTarget(*parts), logits[:, j], valid[:, j]
            loss = divergence_sum(
                predicted, vocabulary.restrict(own), mask, divergence=adaptive_kl_tv
            )
            if self.cross_entropy:
                known = mask & vocabulary.is_known(tokens[:, j])
                cross_entropy = cross_entropy_sum(predicted, tokens[:, j], known)
                weight = self.cross_entropy
                loss = (1 - weight) * loss + weight * cross_entropy
            _, overlap = distribution_overlap(mx.stop_gradient(predicted), own)
            overlap = mx.where(mask, overlap, 0.0).sum()
            count = mask.sum().astype(mx.float32)
            positions.append(mx.stack([loss, overlap, count]))
        return mx.stack(positions, axis=1)


def draft_positions(
    mask: mx.array, starts: mx.array, num_draft_tokens: int
) -> tuple[mx.array, mx.array]:
    """Where the targets of the draft tokens of all rounds are.

    Args:
        mask: bool [B, L], True where the next token is trained.
        starts: int [B, M]; see `Drafter`.

    Returns:
        Positions in the B * L targets, int [B * M, K], and whether this draft token and
        all before it are trained, bool [B * M, K].
    """
    batch, length = mask.shape
    positions = starts[..., None] + mx.arange(num_draft_tokens)
    is_inside = positions < length
    positions = mx.minimum(positions, length - 1)
    positions = positions + length * mx.arange(batch)[:, None, None]
    trained = mask.reshape(-1)[positions] & is_inside
    valid = mx.cumprod(trained.astype(mx.int32), axis=-1) > 0
    return positions.flatten(0, 1), valid.flatten(0, 1)
