"""A target's predictions in the reduced vocabulary of a drafter."""

import mlx.core as mx

from ..models.drafters.base import MIN_LOGIT, Drafter
from ..training.teacher_targets import TeacherTarget

# Lowest log-probability of all tokens of a target that a drafter can draft.
MIN_COVERED = -20.0


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
        """The same probabilities, by draft id; other tokens count as not covered."""
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
