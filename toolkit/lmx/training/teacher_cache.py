"""A teacher's predictions for examples, made once, in the cache that all runs share.

They are kept in blocks under the hash of the teacher and of the block's tokens, so what
was killed goes on with the next block, and other runs with the same rows find them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..data import cache
from ..data.batching import Batch, BucketBatchSampler, ExampleDataset, InMemoryExamples
from .distillation import OnlineTeacher
from .teacher_targets import (
    TeacherTarget,
    bytes_per_token,
    compress_targets,
    decompress_targets,
)

# Trained tokens of a block, tokens a teacher reads at once, and positions whose logits
# exist at once.
BLOCK, AT_ONCE, CHUNK = 1 << 15, 2048, 256
# Trained tokens that tell how sure a teacher is.
JUDGED = 1 << 14


@dataclass(frozen=True)
class TeacherClient:
    """A teacher that is asked when an answer is not in the cache.

    Attributes:
        live: loads it.
        digest: a hash of what it is.
        vocabulary: tokens of which predictions are taken, from the first on.
        say: told how much there is to do.
        warn: told of what is damaged in the cache.
    """

    live: Callable[[], OnlineTeacher]
    digest: str
    vocabulary: int
    info: Callable[[str], None]
    warning: Callable[[str], None]


class CachedTargets:
    """Predictions for the trained tokens of some examples.

    Args:
        folders: of the blocks.
        blocks: the numbers of their examples.
        counts: trained tokens of all examples, int [examples].
    """

    def __init__(self, folders: list[Path], blocks: list[np.ndarray], counts):
        self._arrays = [
            [
                np.load(folder / f"{name}.npy", mmap_mode="r")
                for name in TeacherTarget._fields
            ]
            for folder in folders
        ]
        self._counts = counts
        self._block = np.zeros(len(counts), np.int32)
        self._start = np.zeros(len(counts), np.int64)
        for number, members in enumerate(blocks):
            self._block[members] = number
            self._start[members] = np.cumsum(counts[members]) - counts[members]

    def __call__(self, batch: Batch) -> Batch:
        """The batch with its target, of zeros where nothing is trained."""
        mask = np.array(batch.mask)
        found = []
        for pieces in zip(*map(self._of, batch.example_indices), strict=True):
            values = np.concatenate(pieces)
            array = np.zeros((*mask.shape, *values.shape[1:]), values.dtype)
            array[mask] = values
            found.append(mx.array(array))
        return replace(batch, target=tuple(decompress_targets(*found)))

    def _of(self, member: int) -> list[np.ndarray]:
        start = self._start[member]
        here = slice(start, start + self._counts[member])
        return [array[here] for array in self._arrays[self._block[member]]]


def cache_teacher_targets(
    examples: ExampleDataset,
    wanted: np.ndarray,
    source: TeacherClient,
    *,
    top_k: int,
    temperature: float,
) -> CachedTargets:
    """Ask a teacher for all that is not yet kept.

    Args:
        wanted: numbers of the examples that will be trained on.
        top_k: tokens kept of a position.

    Raises:
        UserError: the disk is too small.
    """
    counts = np.zeros(len(examples), np.int64)
    counts[wanted] = [_trained(examples[n]) for n in wanted]
    total, each = counts.sum(), bytes_per_token(top_k, source.vocabulary)
    source.info(
        f"the teacher's predictions for {total:,} trained tokens, {each:,} bytes of "
        f"each: {total * each / 1e6:,.1f} MB in {cache.root() / 'targets'}"
    )
    edges = np.flatnonzero(np.diff(counts[wanted].cumsum() // BLOCK)) + 1
    blocks = np.split(wanted, edges)
    settings = {"vocabulary": source.vocabulary, "top_k": top_k}
    settings["temperature"] = temperature
    folders, left = [], int(total)
    for number, members in enumerate(blocks, 1):
        own = InMemoryExamples(examples[n] for n in members)
        kept = cache.get_or_create(
            "targets",
            cache.key_of([source.digest, settings, own.digest]),
            partial(_fill, examples=own, source=source, **settings),
            warning=source.warning,
            space=left * each,
        )
        if kept.made and len(blocks) > 1:
            source.info(f"the teacher's predictions: {number} of {len(blocks)} blocks")
        folders.append(kept.folder)
        left -= int(counts[members].sum())
    return CachedTargets(folders, blocks, counts)


def confidence(
    examples: ExampleDataset, wanted: np.ndarray, source: TeacherClient
) -> float:
    """The mean probability that a teacher gives the true tokens.

    Of the first of the examples `wanted`, as many as make `JUDGED` trained tokens; it
    is measured once for these.
    """
    ends = np.cumsum([_trained(examples[n]) for n in wanted[:JUDGED]])
    count = np.searchsorted(ends, JUDGED) + 1
    own = InMemoryExamples(examples[n] for n in wanted[:count])

    def fill(_) -> dict:
        total = count = 0
        for _, tokens, logits in _predictions(own, source):
            logits = nn.log_softmax(logits)
            chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1)
            total += mx.exp(chosen).sum().item()
            count += len(tokens)
        return {"mean": total / count}

    key = cache.key_of([source.digest, source.vocabulary, own.digest])
    return cache.get_or_create("confidence", key, fill, warning=source.warning).facts[
        "mean"
    ]


def _trained(example) -> int:
    return int(example.mask[1:].sum())


def _predictions(
    examples: InMemoryExamples, source: TeacherClient
) -> Iterator[tuple[np.ndarray, mx.array, mx.array]]:
    """Of all trained tokens, a few at once: their numbers, they, and their logits."""
    ends = np.cumsum([_trained(example) for example in examples])
    starts = np.concatenate([[0], ends])
    longest = int(examples.lengths.max()) - 1
    tokens = max(AT_ONCE, longest)
    teacher = source.live()
    for batch in BucketBatchSampler(
        examples, max_seq_length=longest, tokens=tokens
    ).in_order():
        numbers = [np.arange(starts[m], ends[m]) for m in batch.example_indices]
        numbers, places = np.concatenate(numbers), np.flatnonzero(np.array(batch.mask))
        looked = teacher.look(batch.tokens[:, :-1]).flatten(0, 1)
        targets = batch.tokens[:, 1:].reshape(-1)
        for start in range(0, len(places), CHUNK):
            part = mx.array(places[start : start + CHUNK])
            logits = teacher.logits(looked[part])[:, : source.vocabulary]
            own = numbers[start : start + CHUNK]
            yield own, targets[part], logits.astype(mx.float32)


def _fill(
    folder: Path,
    *,
    examples: InMemoryExamples,
    source: TeacherClient,
    vocabulary: int,
    top_k: int,
    temperature: float,
) -> dict:
    """Write the predictions of a block's trained tokens, in the examples' order."""
    count, kept = sum(map(_trained, examples)), min(top_k, vocabulary)
    wide = vocabulary > 1 << 16
    indices = np.zeros((count, kept), np.uint32 if wide else np.uint16)
    log_probs, log_rest = np.zeros((count, kept), np.float16), np.zeros(count, "f4")
    for numbers, _, logits in _predictions(examples, source):
        target = compress_targets(logits, top_k, temperature)
        indices[numbers] = np.array(target.indices)
        log_probs[numbers] = np.array(target.log_probs)
        log_rest[numbers] = np.array(target.log_rest)
    arrays = TeacherTarget(indices, log_probs, log_rest)
    for name, array in arrays._asdict().items():
        np.save(folder / f"{name}.npy", array)
    return {}
