"""A teacher's predictions as predictions of a student with another tokenizer.

The teacher's distribution is one over continuations of the text. The student's
tokenizer encodes each of them, and the student's next token gets its probability. So a
token of the student gets the probabilities of all tokens of the teacher that begin with
it: a sparse projection by strings, as that of X-Token (arXiv 2605.21699).

A token of the student inside one of the teacher is predicted by the teacher's tokens
that start with the bytes before it and go on: the text shows that the teacher's token
does not end here, as it shows at a boundary that it does. For a token that is longer
than the teacher's, the observed tokens of the teacher are followed: by the chain rule,
as in GOLD (huggingface.co/spaces/HuggingFaceH4/on-policy-distillation), every
alternative to an observed token is one more continuation.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from ..data.token_alignment import CONSUMED, COUNT, ROW, START, STOP, AlignedPart
from ..data.token_bytes import TokenBytes

# The teacher's most probable tokens after an observed one that are followed.
ALTERNATIVES = 64
# Tables of continuations in memory.
TABLES = 4096
# Tokens of the teacher, and the student's token that each of them leads to.
Following = tuple[np.ndarray, np.ndarray]


class TokenMapping:
    """Maps distributions.

    Args:
        student_size, teacher_size: logits of the models.
    """

    def __init__(
        self,
        student: TokenBytes,
        teacher: TokenBytes,
        student_size: int,
        teacher_size: int,
    ):
        self.student = student
        self.size = student_size
        # The bucket after those of the student's tokens: the teacher ends the text.
        self.end = student_size
        self.ends = np.array([n for n in sorted(teacher.ends) if n < teacher_size])
        self.pieces = (teacher.pieces + [b""] * teacher_size)[:teacher_size]
        for number in self.ends:
            self.pieces[number] = b""
        self._order = np.argsort(np.array(self.pieces, object), kind="stable")
        self._sorted = [self.pieces[n] for n in self._order]
        firsts = self._next(self.pieces, 0)
        firsts[self.ends] = self.end
        ids = np.flatnonzero(firsts >= 0)
        self._firsts = ids, firsts[ids]
        self._tables = lru_cache(TABLES)(self._continuations)

    def _next(self, texts: Sequence[bytes], at: int) -> np.ndarray:
        """The student's token that starts at byte `at` of each text.

        -1 where no token starts there: the text ends, or a token holds both sides.
        """
        found = np.full(len(texts), -1, np.int64)
        for number, ids in enumerate(self.student.encode(texts)):
            place = 0
            for token in ids:
                if place == at:
                    found[number] = token
                if place >= at:
                    break
                place += len(self.student.pieces[token])
        return found

    def _continuations(self, consumed: bytes, before: bytes) -> Following:
        """The teacher's tokens that start with `consumed` and go on.

        The student's tokens hold the bytes `before` and then the rest of the teacher's
        token; those without a boundary between the two are left out.
        """
        low = bisect_left(self._sorted, consumed)
        # No text has these bytes.
        high = bisect_left(self._sorted, consumed + b"\xff" * 8)
        ids = self._order[low:high]
        texts = [before + self.pieces[n][len(consumed) :] for n in ids]
        following = self._next(texts, len(before))
        return ids[following >= 0], following[following >= 0]

    def distribution(
        self,
        part: AlignedPart,
        place: np.ndarray,
        token: int,
        probs: Mapping[int, np.ndarray],
        end: int,
    ) -> np.ndarray:
        """The student's next token at a place: float64 [student_size].

        Args:
            place: a row of `part.places`.
            token: the observed token of the student.
            probs: of the teacher's tokens by their index in `part.tokens`.
            end: the student's token that ends the text.
        """
        row, count, consumed = place[ROW], place[COUNT], place[CONSUMED]
        path = part.tokens[row : row + count]
        before = part.text[place[START] : place[STOP]]
        first, weights = self.pieces[path[0]], probs[row]
        ids, following = self._firsts
        if consumed:
            ids, following = self._tables(first[:consumed], before)
        mass = np.bincount(following, weights[ids], self.size + 1)
        # The observed token is no alternative to itself.
        observed = weights[path[0]]
        for bucket in following[ids == path[0]]:
            mass[bucket] = max(0.0, mass[bucket] - observed)
        prefix = before + first[consumed:]
        for number in range(1, count):
            weights, tail = probs[row + number], path[number]
            self._follow(mass, observed, weights, tail, prefix, len(before))
            observed = observed * weights[tail]
            prefix += self.pieces[tail]
        mass[token] += observed
        mass[end] += mass[self.end]
        total = mass[:-1].sum()
        if not total:
            # The probability of the observed text is below that of float32.
            mass[token] = total = 1.0
        return mass[:-1] / total

    def _follow(self, mass, weight: float, probs, observed: int, prefix, at) -> None:
        """Add the alternatives to an observed token of the teacher.

        Args:
            mass: of the student's tokens.
            weight: probability of the teacher's tokens before it.
            probs: of the teacher's tokens in its place.
            prefix: the bytes before it, of which the student has read `at`.
        """
        count = min(ALTERNATIVES, len(probs) - 1)
        top = np.argpartition(-probs, count)[:count]
        top = top[top != observed]
        following = self._next([*(prefix + self.pieces[n] for n in top), prefix], at)
        rest = max(0.0, 1 - probs[observed] - probs[top].sum())
        values = weight * np.append(probs[top], rest)
        np.add.at(mass, following[following >= 0], values[following >= 0])
