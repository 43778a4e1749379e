"""Where a student's tokens lie in those of a teacher with another tokenizer.

Both tokenizers encode the same record, each with its own chat template. The trained
text of both, turn by turn, is compared as bytes. A trained token of the student then
has a place in the teacher's tokens: that of the token which holds its first byte.
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise

import numpy as np

from ..errors import UserError
from .batching import ExampleDataset
from .record_formats import DataRecord
from .token_bytes import TokenBytes
from .tokenization import Example, LossOn, encode_block, windows

# Tokens of a sequence that is not cut.
UNCUT = 1 << 30
# Columns of `AlignedExample.places`.
TARGET, ROW, COUNT, CONSUMED, START, STOP = range(6)


@dataclass(frozen=True)
class AlignedPart:
    """Trained tokens of a student's example, and a sequence of the teacher.

    Attributes:
        tokens: the teacher's, int32 [length].
        places: int32 [places, 6], of trained tokens of the student: the index of the
            token in the example; that of the teacher's token which holds its first
            byte; the number of the teacher's tokens that hold all of its bytes; the
            bytes of the first of them before the student's token; where in `text` the
            bytes start that come after the last boundary of both, and where the
            student's token starts.
        text: bytes of the student's trained text.
        same: the number of places with the same bytes on both sides.
    """

    tokens: np.ndarray
    places: np.ndarray
    text: bytes
    same: int

    @property
    def digest(self) -> str:
        """A hash of the tokens, the places and the text."""
        total = hashlib.sha256(self.tokens.tobytes())
        total.update(self.places.tobytes())
        total.update(self.text)
        return total.hexdigest()


# The teacher's side of an example: several parts if the templates split a chat in
# different ways, none if nothing is aligned.
AlignedExample = tuple[AlignedPart, ...]


@dataclass
class AlignmentStats:
    """Counts of the student's trained tokens.

    Attributes:
        trained: all of them.
        placed: those with a place in the teacher's tokens.
        same: those with the same bytes as the teacher's token.
        failed: (where, reason) of the examples without any place.
    """

    trained: int = 0
    placed: int = 0
    same: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)


class NotAligned(Exception):
    """The teacher has no such text."""


@dataclass(frozen=True)
class TokenRun:
    """Tokens that are trained together, as bytes.

    Attributes:
        first: index of the first of them in the example.
        edges: bytes before every token, and of all.
        text: the bytes.
        has_end: the last token ends the text, and has no bytes.
    """

    first: int
    edges: list[int]
    text: bytes
    has_end: bool


def token_runs(
    example: Example, vocabulary: TokenBytes, *, is_whole: bool
) -> list[TokenRun]:
    """The runs of trained tokens.

    Args:
        is_whole: all tokens are one run; BOS is not in it.
    """
    if is_whole:
        bos = vocabulary.tokenizer.bos_token_id
        ranges = [(int(example.tokens[0] == bos), len(example.tokens))]
    else:
        ranges, end = [], 0
        for is_trained, group in groupby(example.mask.tolist()):
            start, end = end, end + len(list(group))
            if is_trained:
                ranges.append((start, end))
    runs = []
    for start, end in ranges:
        ids = example.tokens[start:end].tolist()
        has_end = bool(ids) and ids[-1] in vocabulary.ends
        pieces = [vocabulary.pieces[number] for number in ids]
        if has_end:
            pieces[-1] = b""
        edges = [0, *accumulate(map(len, pieces))]
        runs.append(TokenRun(start, edges, b"".join(pieces), has_end))
    return runs


def common_blocks(text: bytes, other: bytes) -> list[tuple[int, int, int]]:
    """Where two texts agree: (start in the first, start in the other, length).

    Whitespace may be missing on one side: templates strip it, and SentencePiece adds a
    space after an added token. The blocks end where anything else differs.
    """
    blocks, start, other_start = [], 0, 0
    while start < len(text) and other_start < len(other):
        if length := _common_length(text, start, other, other_start):
            blocks.append((start, other_start, length))
            start, other_start = start + length, other_start + length
        elif text[start : start + 1].isspace():
            start += 1
        elif other[other_start : other_start + 1].isspace():
            other_start += 1
        else:
            break
    return blocks


def _common_length(text: bytes, start: int, other: bytes, other_start: int) -> int:
    """The number of bytes that two texts have in common from two places on."""
    length, step = 0, 64
    most = min(len(text) - start, len(other) - other_start)
    while step:
        step = min(step, most - length)
        low, other_low = start + length, other_start + length
        if text[low : low + step] == other[other_low : other_low + step]:
            length += step
            step *= 2
        else:
            # The difference is in this piece.
            most, step = length + step - 1, step // 2
    return length


def places_of_run(student: TokenRun, teacher: TokenRun) -> np.ndarray:
    """The places of a run, int64 [places, 7].

    Rows of `AlignedPart.places`, and 1 if the bytes are the same on both sides. Tokens
    outside the blocks of common bytes have no place.
    """
    blocks = common_blocks(student.text, teacher.text)
    starts = [block[0] for block in blocks]
    edges, boundary, places = set(teacher.edges), 0, []
    for number, (start, end) in enumerate(pairwise(student.edges)):
        block = bisect_right(starts, start) - 1
        if block < 0 or start == end:
            continue
        low, other_low, length = blocks[block]
        shift = other_low - low
        if start + shift in edges:
            boundary = start
        if end > low + length:
            continue
        first = bisect_right(teacher.edges, start + shift) - 1
        last = bisect_left(teacher.edges, end + shift) - 1
        consumed, count = start + shift - teacher.edges[first], last - first + 1
        row, is_whole = teacher.first + first, teacher.edges[last + 1] == end + shift
        is_same = not consumed and count == 1 and is_whole
        target = student.first + number
        places.append((target, row, count, consumed, boundary, start, is_same))
    start, other_start, length = blocks[-1] if blocks else (0, 0, 0)
    ends = start + length, other_start + length
    end_together = ends == (len(student.text), len(teacher.text))
    if student.has_end and teacher.has_end and end_together:
        place = (r.first + len(r.edges) - 2 for r in (student, teacher))
        places.append((*place, 1, 0, len(student.text), len(student.text), True))
    found = np.array(places, np.int64).reshape(-1, 7)
    # Nothing predicts the teacher's first token.
    return found[found[:, ROW] > 0]


class Aligner:
    """Aligns the examples of records.

    Args:
        max_seq_length, loss_on: of the student's examples.
    """

    def __init__(
        self,
        student: TokenBytes,
        teacher: TokenBytes,
        *,
        max_seq_length: int,
        loss_on: LossOn,
    ):
        self.student = student
        self.teacher = teacher
        self.max_seq_length = max_seq_length
        self.loss_on = loss_on

    def align(
        self,
        examples: ExampleDataset,
        members: np.ndarray,
        records: Iterable[DataRecord],
    ) -> tuple[list[AlignedExample], AlignmentStats]:
        """The teacher's side of some examples.

        Args:
            members: the indices of these examples.
            records: all records of the examples.
        """
        names = [examples[n].where for n in members]
        wanted, sides, reasons = set(names), {}, {}
        for record in records:
            if record.where in wanted:
                try:
                    sides |= self._sides(record)
                except NotAligned as error:
                    reasons[record.where] = str(error)
        aligned, stats = [], AlignmentStats()
        for number, name in zip(members, names, strict=True):
            example = examples[number]
            side = sides.get(_identity(name, example.tokens, example.mask), ())
            aligned.append(side)
            stats.trained += int(example.mask[1:].sum())
            stats.placed += sum(len(part.places) for part in side)
            stats.same += sum(part.same for part in side)
            if not side:
                stats.failed.append((name, reasons.get(name, "nothing is aligned")))
        return aligned, stats

    def _sides(self, record: DataRecord) -> dict[bytes, AlignedExample]:
        """The teacher's side of every example of a record, by `_identity`."""
        is_whole = record.text is not None or self.loss_on == "all"
        ours = self._uncut(record, self.student)
        runs = [token_runs(e, self.student, is_whole=is_whole) for e in ours]
        theirs = [
            (other, run)
            for other in self._uncut(record, self.teacher)
            for run in token_runs(other, self.teacher, is_whole=is_whole)
        ]
        if (count := sum(map(len, runs))) != len(theirs):
            raise NotAligned(f"{count} turns are {len(theirs)} for the teacher")
        found, sides = iter(theirs), {}
        for example, own in zip(ours, runs, strict=True):
            pairs = [(run, *next(found)) for run in own]
            placed = [(*pair, places_of_run(pair[0], pair[2])) for pair in pairs]
            for start, end, mask in windows(
                example.mask.tolist(),
                self.max_seq_length,
                is_text=record.text is not None,
            ):
                key = _identity(record.where, example.tokens[start:end], mask)
                sides[key] = self._parts(placed, start, mask)
        if not any(sides.values()):
            texts = runs[0][0].text, theirs[0][1].text
            at = _common_length(texts[0], 0, texts[1], 0)
            own, other = (text[max(0, at - 20) : at + 20] for text in texts)
            raise NotAligned(
                f"the texts differ: {own!r} and, for the teacher, {other!r}"
            )
        return sides

    def _uncut(self, record: DataRecord, vocabulary: TokenBytes) -> list[Example]:
        settings = {"max_seq_length": UNCUT, "loss_on": self.loss_on}
        try:
            encoded = encode_block([record], vocabulary.tokenizer, **settings)
        except UserError as error:
            # The teacher has no chat template; the student has encoded this before.
            raise NotAligned(f"for the teacher, {error.message}") from None
        if encoded.dropped:
            raise NotAligned(f"for the teacher, {encoded.dropped[0][1]}")
        return encoded.examples

    def _parts(self, placed: list, start: int, mask: np.ndarray) -> AlignedExample:
        """The parts of a window from token `start` on: the runs by the sequence of the
        teacher that they are in."""
        by_sequence: dict[int, list] = {}
        for run, other, _, places in placed:
            low, high = np.searchsorted(places[:, TARGET], [start, start + len(mask)])
            inside = places[low:high] - [start, 0, 0, 0, 0, 0, 0]
            inside = inside[mask[inside[:, TARGET]]]
            if len(inside):
                by_sequence.setdefault(id(other), []).append((run, other, inside))
        parts = []
        for runs in by_sequence.values():
            text, rows = b"", []
            for run, _, places in runs:
                low, high = places[0, START], places[-1, STOP]
                places[:, [START, STOP]] += len(text) - low
                rows.append(places)
                text += run.text[low:high]
            places, tokens = np.concatenate(rows), runs[0][1].tokens
            # The teacher sees no more of a text than the student: the sequence is cut
            # after the last token that is needed, and a text before the first.
            end = int((places[:, ROW] + places[:, COUNT]).max())
            first = int(places[0, ROW]) - 1 if start else 0
            is_bos = tokens[0] == self.teacher.tokenizer.bos_token_id
            before = tokens[: int(first > 0 and is_bos)]
            places[:, ROW] += len(before) - first
            tokens = np.concatenate([before, tokens[first:end]])
            same = int(places[:, -1].sum())
            found = places[:, :-1].astype(np.int32)
            parts.append(AlignedPart(tokens, found, text, same))
        return tuple(parts)


def _identity(where: str, tokens: np.ndarray, mask: np.ndarray) -> bytes:
    """A hash of an example."""
    total = hashlib.sha256(where.encode())
    total.update(tokens.tobytes())
    total.update(mask.tobytes())
    return total.digest()
