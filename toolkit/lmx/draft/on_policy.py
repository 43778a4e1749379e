"""Lessons of the last steps: where the draft's guesses fell, and how it went on there.

Error-position replay after Draft-OPD (arXiv 2605.29343). The draft guesses along the
answers of the target; in each of them one guess that fell is picked, the draft writes
on from that place, and the target tells what it would have said instead.
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
    """An answer of the target up to where a guess fell, and the draft's own words.

    Attributes:
        tokens: of the prompt, the answer and the guesses.
        asked: tokens of the prompt.
        guessed: tokens of the draft, the last ones.
    """

    tokens: list[int]
    asked: int
    where: str
    guessed: int = 0

    @property
    def example(self) -> Example:
        """Trained behind the prompt."""
        trained = np.arange(len(self.tokens)) >= self.asked
        return Example(np.array(self.tokens, np.int32), trained, self.where)


class OnPolicyBatches:
    """Batches of a training that begins with lessons and ends with replays of them.

    Args:
        begin: the first step of replays.
        folder: keeps what the draft wrote, so that a run that goes on learns from it.
        draft: gives the model as it is now.
        stop_tokens: those that end what is written.

    Attributes:
        digest: a hash of all that decides about the batches but the draft.
    """

    def __init__(
        self,
        lessons: DistillationBatches,
        settings: OnPolicyConfig,
        *,
        begin: int,
        folder: Path,
        draft: Callable[[], Any],
        stop_tokens: frozenset[int],
        info: Callable[[str], None],
    ):
        self.lessons = lessons
        self.settings = settings
        self.begin = begin
        self.folder = folder
        self.draft = draft
        self.stop_tokens = stop_tokens
        self.info = info
        facts = [lessons.digest, begin, settings.model_dump()]
        self.digest = sha256(repr(facts).encode()).hexdigest()
        # Steps come in their order, so of earlier ones nothing is wanted again.
        self._replayed = lru_cache(maxsize=1)(self._made_or_kept)

    def __call__(self, step: int) -> Batch:
        """The batch of a step, counted from 0."""
        if step < self.begin:
            return self.lessons(step)
        part, place = divmod(step - self.begin, self.settings.rollout_interval)
        return self._replayed(part)(place)

    def _made_or_kept(self, part: int) -> DistillationBatches:
        place = self.folder / f"{part:05d}.json"
        if place.is_file():
            found = [ErrorReplay(**kept) for kept in json.loads(place.read_text())]
        else:
            found = self._made(part)
            write_atomic(place, json.dumps([asdict(replay) for replay in found]))
        if not found:
            return self.lessons
        examples = [replay.example for replay in found]
        return self.lessons.like(examples, [replay.guessed for replay in found])

    def _made(self, part: int) -> list[ErrorReplay]:
        """Replays of the lessons whose turn it would be."""
        refresh = self.settings.rollout_interval
        first = self.begin + part * refresh
        draws = np.random.default_rng([self.lessons.seed, first])
        draft = self.draft()
        cut = [
            replay
            for step in range(first, first + refresh)
            for replay in find_rejections(draft, self.lessons(step), draws)
        ]
        self.info(f"step {first}: {len(cut):,} guesses that fell are replayed")
        written = generate_batch(
            draft, [self._request(replay, draws) for replay in cut]
        )
        return [
            replace(replay, tokens=replay.tokens + guesses, guessed=len(guesses))
            for replay, guesses in zip(cut, written, strict=True)
        ]

    def _request(
        self, replay: ErrorReplay, draws: np.random.Generator
    ) -> GenerationRequest:
        """Asks the draft to write on, as far as batches have room."""
        room = self.lessons.max_seq_length + 1 - len(replay.tokens)
        return GenerationRequest(
            replay.tokens,
            min(self.settings.rollout_tokens, room),
            Sampling(temperature=1.0, seed=int(draws.integers(2**31))),
            self.stop_tokens,
        )


def find_rejections(
    draft: Any, lesson: Batch, draws: np.random.Generator
) -> list[ErrorReplay]:
    """The answers of a batch, each up to a place where a guess of the draft falls.

    The place is drawn by the chance that a guess falls there, 1 - sum min(p, q). The
    first token of an answer is no guess's. An answer where all stands is left out.
    """
    tokens, mask = np.array(lesson.tokens), np.array(lesson.mask)
    _, most = acceptance_bounds(draft, lesson)
    falls = np.maximum(0.0, 1.0 - np.array(most, np.float64))
    found = []
    for row, where in enumerate(lesson.where):
        first, *guessed = np.flatnonzero(mask[row])
        shares = falls[row, guessed]
        if shares.sum() > 0:
            place = draws.choice(guessed, p=shares / shares.sum())
            said = tokens[row, : place + 1].tolist()
            found.append(ErrorReplay(said, int(first) + 1, where))
    return found
