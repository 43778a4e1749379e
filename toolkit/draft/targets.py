"""Answers of a target in batches, with what it predicted at every place."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256

import mlx.core as mx
import numpy as np

from ..data import cache
from ..data.batches import Batch, Batches, Listed
from ..data.template import Example
from ..run.report import Report
from ..train.targets import Target, compressed, make_targets, restored, whole


class Lessons:
    """Fixed batches of answers, in an order that every epoch draws anew.

    The target of a batch has the parts of a `Target`, and bool [B, L]: whether the next
    token is the teacher's own.

    Args:
        teacher: logits [B, L, V] of tokens [B, L].
        key: of the teacher.
        tokens: padded tokens of a batch, at most.
        top_k: tokens named of every prediction; None = all.
        report: told how large the predictions are, which are made once and kept in the
            cache; None = the teacher is asked anew for every batch, as with `top_k`
            None.
        guessed: last tokens of every example that are not the teacher's own; None = no
            token.

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
        report: Report | None,
        guessed: Sequence[int] | None = None,
    ):
        batches = Batches(examples, max_length=max_length, tokens=tokens)
        facts = [key, Listed(examples).digest, max_length, tokens, top_k]
        self.digest = sha256(repr(facts).encode()).hexdigest()
        self.max_length = max_length
        self.seed = seed
        self._batches = list(batches.in_order())
        self._teacher = teacher
        self._settings = {"key": key, "max_length": max_length, "tokens": tokens}
        self._settings |= {"top_k": top_k, "seed": seed}
        # Of every example, how many tokens are the teacher's own.
        guessed = guessed or [0] * len(examples)
        pairs = zip(examples, guessed, strict=True)
        self._own = [len(example.tokens) - count for example, count in pairs]
        self._kept = None
        if report and top_k is not None:
            self._kept = make_targets(
                cache.root() / "lessons" / cache.key_of(facts),
                [mx.contiguous(batch.tokens[:, :-1]) for batch in self._batches],
                teacher,
                digest=key,
                top_k=top_k,
                say=report.say,
            )

    def like(self, examples: list[Example], guessed: Sequence[int]) -> "Lessons":
        """Others of the same teacher, which is asked for every batch."""
        settings = self._settings | {"report": None, "guessed": guessed}
        return Lessons(examples, self._teacher, **settings)

    def __len__(self) -> int:
        return len(self._batches)

    def __call__(self, step: int) -> Batch:
        """The batch of a step, counted from 0, over as many epochs as it takes."""
        epoch, place = divmod(step, len(self))
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self))
        return self[int(order[place])]

    def __getitem__(self, number: int) -> Batch:
        batch = self._batches[number]
        own = np.ones(batch.mask.shape, bool)
        for row, member in enumerate(batch.members):
            own[row, self._own[member] - 1 :] = False
        return replace(batch, target=(*self._target(number), mx.array(own)))

    def __iter__(self) -> Iterator[Batch]:
        return (self[number] for number in range(len(self)))

    def _target(self, number: int) -> Target:
        if self._kept:
            return self._kept[number]
        logits = self._teacher(self._batches[number].tokens[:, :-1])
        top_k = self._settings["top_k"]
        return whole(logits) if top_k is None else restored(*compressed(logits, top_k))
