"""Answers of a target in batches, with what it predicted at every place."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256

import mlx.core as mx
import numpy as np

from ..data import cache
from ..data.batches import Batch, Batches, Listed
from ..data.template import Example
from ..run.report import Report
from ..train.targets import Target, make_targets, whole


class Lessons:
    """Fixed batches of answers, in an order that every epoch draws anew.

    Args:
        teacher: logits [B, L, V] of tokens [B, L].
        key: of the teacher.
        tokens: padded tokens of a batch, at most.
        top_k: tokens named of every prediction; these are made once and kept in the
            cache. None = the teacher is asked anew for every batch, and names all.

    Attributes:
        digest: a hash of answers and predictions.
    """

    def __init__(
        self,
        examples: list[Example],
        teacher: Callable[[mx.array], mx.array],
        *,
        key: str,
        max_length: int,
        tokens: int,
        top_k: int | None,
        seed: int,
        report: Report,
    ):
        batches = Batches(examples, max_length=max_length, tokens=tokens)
        facts = [key, Listed(examples).digest, max_length, tokens, top_k]
        self.digest = sha256(repr(facts).encode()).hexdigest()
        self.seed = seed
        self._batches = list(batches.in_order())
        self._teacher = teacher
        self._kept = None
        if top_k is not None:
            self._kept = make_targets(
                cache.root() / "lessons" / cache.key_of(facts),
                [mx.contiguous(batch.tokens[:, :-1]) for batch in self._batches],
                teacher,
                digest=key,
                top_k=top_k,
                say=report.say,
            )

    def __len__(self) -> int:
        return len(self._batches)

    def __call__(self, step: int) -> Batch:
        """The batch of a step, counted from 0, over as many epochs as it takes."""
        epoch, place = divmod(step, len(self))
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self))
        return self[int(order[place])]

    def __getitem__(self, number: int) -> Batch:
        return replace(self._batches[number], target=tuple(self._target(number)))

    def __iter__(self) -> Iterator[Batch]:
        return (self[number] for number in range(len(self)))

    def _target(self, number: int) -> Target:
        if self._kept:
            return self._kept[number]
        return whole(self._teacher(self._batches[number].tokens[:, :-1]))
