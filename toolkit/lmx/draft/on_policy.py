"""On-policy training: batches that continue from the draft's rejected tokens.

Error-position replay after Draft-OPD (arXiv 2605.29343). In every completion of the
target one rejected draft token is picked. The draft generates from that position, and
the target's predictions on these tokens are the training targets.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from ..config.draft import OnPolicyConfig
from ..data.batching import Batch
from ..data.tokenization import Example
from ..generation.batching import GenerationRequest
from ..generation.completions import generate_batch
from ..generation.sampling import Sampling
from ..run.fs import write_atomic
from .dataset import DistillationBatches
from .losses import acceptance_bounds


@dataclass(frozen=True)
class ErrorReplay:
    """A completion of the target up to a rejection, continued by the draft.

    Attributes:
        tokens: prompt, completion and draft tokens.
        prompt_length: number of prompt tokens.
        num_draft_tokens: number of draft tokens at the end.
    """

    tokens: list[int]
    prompt_length: int
    where: str
    num_draft_tokens: int = 0

    @property
    def example(self) -> Example:
        """An example in which all tokens after the prompt are trainable."""
        mask = np.arange(len(self.tokens)) >= self.prompt_length
        return Example(np.array(self.tokens, np.int32), mask, self.where)


class OnPolicyBatches:
    """Off-policy batches at first, then batches of error replays.

    Args:
        batches: the off-policy batches.
        begin: the first step with replays.
        folder: stores the replays, so that a resumed run trains on the same ones.
        draft: returns the current draft model.
        stop_tokens: tokens that end a rollout.

    Attributes:
        digest: hash of everything that determines the batches, except the draft.
    """

    def __init__(
        self,
        batches: DistillationBatches,
        config: OnPolicyConfig,
        *,
        begin: int,
        folder: Path,
        draft: Callable[[], Any],
        stop_tokens: frozenset[int],
        info: Callable[[str], None],
    ):
        self.batches = batches
        self.config = config
        self.begin = begin
        self.folder = folder
        self.draft = draft
        self.stop_tokens = stop_tokens
        self.info = info
        facts = [batches.digest, begin, config.model_dump()]
        self.digest = sha256(repr(facts).encode()).hexdigest()
        # Steps are requested in order, so one interval is enough.
        self._replay_batches = lru_cache(maxsize=1)(self._load_or_make)

    def __call__(self, step: int) -> Batch:
        """The batch of a step, from 0."""
        if step < self.begin:
            return self.batches(step)
        interval, offset = divmod(step - self.begin, self.config.rollout_interval)
        return self._replay_batches(interval)(offset)

    def _load_or_make(self, interval: int) -> DistillationBatches:
        path = self.folder / f"{interval:05d}.json"
        if path.is_file():
            replays = [ErrorReplay(**record) for record in json.loads(path.read_text())]
        else:
            replays = self._make(interval)
            write_atomic(path, json.dumps([asdict(replay) for replay in replays]))
        if not replays:
            return self.batches
        return self.batches.with_examples(
            [replay.example for replay in replays],
            [replay.num_draft_tokens for replay in replays],
        )

    def _make(self, interval: int) -> list[ErrorReplay]:
        """Replays of the off-policy batches that this interval replaces."""
        length = self.config.rollout_interval
        first = self.begin + interval * length
        rng = np.random.default_rng([self.batches.seed, first])
        draft = self.draft()
        replays = [
            replay
            for step in range(first, first + length)
            for replay in find_rejections(draft, self.batches(step), rng)
        ]
        self.info(f"step {first}: replaying {len(replays):,} rejected draft tokens")
        rollouts = generate_batch(draft, [self._request(r, rng) for r in replays])
        return [
            replace(
                replay,
                tokens=replay.tokens + draft_tokens,
                num_draft_tokens=len(draft_tokens),
            )
            for replay, draft_tokens in zip(replays, rollouts, strict=True)
        ]

    def _request(
        self, replay: ErrorReplay, rng: np.random.Generator
    ) -> GenerationRequest:
        """A rollout of the draft, limited by the batches' sequence length."""
        room = self.batches.max_seq_length + 1 - len(replay.tokens)
        return GenerationRequest(
            replay.tokens,
            min(self.config.rollout_tokens, room),
            Sampling(temperature=1.0, seed=int(rng.integers(2**31))),
            self.stop_tokens,
        )


def find_rejections(
    draft: Any, batch: Batch, rng: np.random.Generator
) -> list[ErrorReplay]:
    """The completions of a batch, each cut at a position where the draft is rejected.

    The position is sampled with the rejection probability 1 - sum min(p, q). The first
    token of a completion is never drafted. Completions without a rejection are skipped.
    """
    tokens, mask = np.array(batch.tokens), np.array(batch.mask)
    _, upper_bound = acceptance_bounds(draft, batch)
    rejection_probs = np.maximum(0.0, 1.0 - np.array(upper_bound, np.float64))
    replays = []
    for index, where in enumerate(batch.where):
        first, *drafted = np.flatnonzero(mask[index])
        probs = rejection_probs[index, drafted]
        if probs.sum() > 0:
            position = rng.choice(drafted, p=probs / probs.sum())
            accepted = tokens[index, : position + 1].tolist()
            replays.append(ErrorReplay(accepted, int(first) + 1, where))
    return replays
