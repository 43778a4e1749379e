"""Answers of a target in batches, with what it predicted at every place."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..data import cache
from ..data.batches import Batch, Batches, Listed
from ..data.template import Example
from ..run.report import Report
from ..train.targets import Target, Targets, make_targets


@dataclass(frozen=True)
class Lesson(Batch):
    """A batch with the target's predictions of its targets, [B, L, k]."""

    target: Target | None = None


class Lessons:
    """Fixed batches of answers, in an order that every epoch draws anew.

    Predictions are kept in the cache: what is run again finds them there.

    Args:
        teacher: logits [B, L, V] of tokens [B, L].
        key: of the answers' target.
        tokens: padded tokens of a batch, at most.
        top_k: tokens named of every prediction.
    """

    def __init__(
        self,
        examples: list[Example],
        teacher: Callable[[mx.array], mx.array],
        *,
        key: str,
        max_length: int,
        tokens: int,
        top_k: int,
        seed: int,
        report: Report,
    ):
        self.digest = Listed(examples).digest
        self.seed = seed
        batches = Batches(examples, max_length=max_length, tokens=tokens)
        self._batches = list(batches.in_order())
        facts = [key, self.digest, max_length, tokens, top_k]
        self._targets: Targets = make_targets(
            cache.root() / "predictions" / cache.key_of(facts),
            [mx.contiguous(batch.tokens[:, :-1]) for batch in self._batches],
            teacher,
            digest=key,
            top_k=top_k,
            say=report.say,
        )

    def __len__(self) -> int:
        return len(self._batches)

    def __call__(self, step: int) -> Lesson:
        """The batch of a step, counted from 0, over as many epochs as it takes."""
        epoch, place = divmod(step, len(self))
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self))
        return self[int(order[place])]

    def __getitem__(self, number: int) -> Lesson:
        batch, target = self._batches[number], self._targets[number]
        return Lesson(batch.tokens, batch.mask, batch.where, target=target)

    def __iter__(self) -> Iterator[Lesson]:
        return (self[number] for number in range(len(self)))
