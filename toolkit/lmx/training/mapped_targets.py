"""Targets of a teacher with another tokenizer, for the trained tokens of examples."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..data.batching import BucketBatchSampler, InMemoryExamples
from ..data.token_alignment import COUNT, ROW, TARGET, AlignedExample, AlignedPart
from ..data.tokenization import Example
from .distillation import OnlineTeacher
from .teacher_targets import TeacherTarget, compress_targets
from .token_mapping import TokenMapping

# Places whose distributions exist at once.
CHUNK = 256
# The lowest probability of a token, in float32.
MIN_PROB = 1e-37


@dataclass(frozen=True)
class MappedTeacher:
    """What the predictions of a teacher with another tokenizer need.

    Attributes:
        mapping: to the student's tokens.
        sides: the teacher's side of every example, by its index.
    """

    mapping: TokenMapping
    sides: dict[int, AlignedExample]

    def digests(self, members: np.ndarray) -> list[str]:
        """Values that change with the teacher's tokens of these examples."""
        return [part.digest for n in members for part in self.sides[int(n)]]

    def targets(
        self,
        examples: Sequence[Example],
        members: np.ndarray,
        load: Callable[[], OnlineTeacher],
        *,
        top_k: int,
        temperature: float,
        batch_tokens: int,
    ) -> Iterator[tuple[np.ndarray, TeacherTarget]]:
        """Numbers and targets of all trained tokens of the examples, in pieces.

        A token without a place has its label as the target.

        Args:
            members: the indices of the examples.
        """
        counts = [int(example.mask[1:].sum()) for example in examples]
        starts = np.cumsum(counts) - counts
        parts, owners, placed = [], [], []
        for number, member in enumerate(members):
            for part in self.sides[int(member)]:
                parts.append(part)
                owners.append(number)
                ranks = np.cumsum(examples[number].mask) - 1
                placed.append(starts[number] + ranks[part.places[:, TARGET]])
        missing = np.setdiff1d(np.arange(sum(counts)), np.concatenate([[], *placed]))
        labels = np.concatenate([example.tokens[example.mask] for example in examples])
        for numbers in np.split(missing, range(CHUNK, len(missing), CHUNK)):
            mass = np.zeros((len(numbers), self.mapping.size), np.float32)
            mass[np.arange(len(numbers)), labels[numbers]] = 1
            if len(numbers):
                yield numbers, _compress(mass, top_k, temperature)
        for index, low, mass in self._masses(
            parts, owners, examples, load, batch_tokens
        ):
            numbers = placed[index][low : low + len(mass)]
            yield numbers, _compress(mass, top_k, temperature)

    def _masses(
        self, parts: list[AlignedPart], owners: list[int], examples, load, batch_tokens
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        """Number of a part, first place, and probabilities [places, student_size]."""
        if not parts:
            return
        online = load()
        sequences = InMemoryExamples(
            Example(part.tokens, np.ones(len(part.tokens), bool), "") for part in parts
        )
        longest = int(sequences.lengths.max()) - 1
        for batch in BucketBatchSampler(
            sequences, max_seq_length=longest, batch_tokens=max(batch_tokens, longest)
        ).in_order():
            hidden = online.hidden(batch.tokens[:, :-1])
            for states, index in zip(hidden, batch.example_indices, strict=False):
                part, example = parts[index], examples[owners[index]]
                trained = example.tokens[example.mask]
                last, student = int(trained[-1]), self.mapping.student
                end = last if last in student.ends else student.tokenizer.eos_token_id
                for low in range(0, len(part.places), CHUNK):
                    places = part.places[low : low + CHUNK]
                    probs = self._probabilities(places, states, online)
                    mass = [
                        self.mapping.distribution(
                            part, place, int(example.tokens[place[TARGET]]), probs, end
                        )
                        for place in places
                    ]
                    yield index, low, np.array(mass, np.float32)

    def _probabilities(
        self, places: np.ndarray, states: mx.array, online: OnlineTeacher
    ) -> dict[int, np.ndarray]:
        """The teacher's, by the index of the predicted token."""
        rows = np.unique(
            np.concatenate([np.arange(p[ROW], p[ROW] + p[COUNT]) for p in places])
        )
        found: dict[int, np.ndarray] = {}
        for some in np.split(rows, range(CHUNK, len(rows), CHUNK)):
            logits = online.logits(states[mx.array(some - 1)]).astype(mx.float32)
            size = len(self.mapping.pieces)
            probs = np.array(mx.softmax(logits[:, :size], axis=-1))
            found |= zip(some.tolist(), probs, strict=True)
        return found


def _compress(mass: np.ndarray, top_k: int, temperature: float) -> TeacherTarget:
    logits = mx.log(mx.maximum(mx.array(mass), MIN_PROB))
    return compress_targets(logits, top_k, temperature)
