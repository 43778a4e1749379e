"""Teacher predictions on disk, computed once and resumed after an interruption.

There are two indexes of the same blocks (`save_targets`). `CachedTargets` reads the
trained tokens of any example, from blocks in the cache that all runs share.
`PartTargets` reads whole parts of a fixed text, from a folder of the caller, at the
batch shapes that the caller chose: the shape of a batch changes the rounding of the
teacher's logits, so neither index can serve the other's readers with the same bits.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..cpu import on_cpu
from ..data import cache
from ..data.batching import Batch, BucketBatchSampler, ExampleDataset, InMemoryExamples
from ..files.artifacts import ArtifactStore, Origin
from ..files.atomic import require_space
from ..interfaces import SINGLE_PROCESS, Communicator, Logger
from .distillation import OnlineTeacher
from .mapped_targets import MappedTeacher
from .teacher_targets import (
    TeacherTarget,
    bytes_per_token,
    compress_targets,
    decompress_targets,
    load_targets,
    save_targets,
)

# Trained tokens per block, and tokens per forward pass.
BLOCK_TOKENS, BATCH_TOKENS = 1 << 15, 2048
# Positions per chunk of logits; a CPU's cache holds fewer.
LOGIT_POSITIONS, CPU_LOGIT_POSITIONS = 256, 64


@dataclass(frozen=True)
class TeacherClient:
    """A teacher that is loaded only if a prediction is not in the cache.

    Attributes:
        load: loads it.
        digest: a hash of the teacher.
        vocab_size: predictions cover this many tokens, from the first on.
        logger: shows progress, and damaged blocks.
        ranks: have the same teacher and examples; each makes its share of the blocks.
        mapped: maps the predictions if the teacher has another tokenizer.
    """

    load: Callable[[], OnlineTeacher]
    digest: str
    vocab_size: int
    logger: Logger
    ranks: Communicator = SINGLE_PROCESS
    mapped: MappedTeacher | None = None

    def digests_of(self, members: np.ndarray) -> list[str]:
        """What changes with the teacher's own tokens of these examples."""
        return self.mapped.digests(members) if self.mapped else []


class CachedTargets:
    """Predictions for the trained tokens of some examples.

    Args:
        folders: of the blocks.
        blocks: the indices of their examples.
        counts: trained tokens of all examples, int [examples].
    """

    def __init__(self, folders: list[Path], blocks: list[np.ndarray], counts):
        self._arrays = [load_targets(folder) for folder in folders]
        self._counts = counts
        self._block = np.zeros(len(counts), np.int32)
        self._start = np.zeros(len(counts), np.int64)
        for number, members in enumerate(blocks):
            self._block[members] = number
            self._start[members] = np.cumsum(counts[members]) - counts[members]

    def __call__(self, batch: Batch) -> Batch:
        """The batch with its target, which is zero where nothing is trained."""
        mask = np.array(batch.mask)
        target = []
        for pieces in zip(*map(self._of_example, batch.example_indices), strict=True):
            values = np.concatenate(pieces)
            array = np.zeros((*mask.shape, *values.shape[1:]), values.dtype)
            array[mask] = values
            target.append(mx.array(array))
        return replace(batch, target=tuple(decompress_targets(*target)))

    def _of_example(self, member: int) -> list[np.ndarray]:
        start = self._start[member]
        tokens = slice(start, start + self._counts[member])
        return [array[tokens] for array in self._arrays[self._block[member]]]


def cache_teacher_targets(
    examples: ExampleDataset,
    members: np.ndarray,
    teacher: TeacherClient,
    *,
    top_k: int,
    temperature: float,
) -> CachedTargets:
    """Compute the predictions that are not in the cache.

    Args:
        members: indices of the examples that are trained on.
        top_k: tokens kept per position.

    Raises:
        UserError: the disk is too small.
    """
    counts = np.zeros(len(examples), np.int64)
    counts[members] = [_num_trained(examples[n]) for n in members]
    total, token_bytes = counts.sum(), bytes_per_token(top_k, teacher.vocab_size)
    teacher.logger.info(
        f"teacher predictions for {total:,} trained tokens, {token_bytes:,} bytes "
        f"each: {total * token_bytes / 1e6:,.1f} MB in {cache.root() / 'targets'}"
    )
    edges = np.flatnonzero(np.diff(counts[members].cumsum() // BLOCK_TOKENS)) + 1
    blocks = np.split(members, edges)
    settings = {"vocabulary": teacher.vocab_size, "top_k": top_k}
    settings["temperature"] = temperature
    sizes = [int(counts[block].sum()) for block in blocks]

    def block_examples(number: int) -> InMemoryExamples:
        return InMemoryExamples(examples[n] for n in blocks[number])

    with teacher.logger.progress(total, "teacher predictions", percent=True) as bar:

        def make(number: int, folder: Path) -> None:
            block = block_examples(number)
            options = {"top_k": top_k, "temperature": temperature}
            if teacher.mapped is None:
                targets = _predictions(block, teacher, **options)
            else:
                targets = teacher.mapped.targets(
                    block,
                    blocks[number],
                    teacher.load,
                    batch_tokens=BATCH_TOKENS,
                    **options,
                )
            num_tokens = sum(map(_num_trained, block))
            k = min(top_k, teacher.vocab_size)
            # Of the block's trained tokens, in the examples' order.
            whole = TeacherTarget(
                np.zeros((num_tokens, k), np.uint32),
                np.zeros((num_tokens, k), np.float16),
                np.zeros(num_tokens, np.float32),
            )
            for numbers, target in targets:
                for array, values in zip(whole, target, strict=True):
                    array[numbers] = np.array(values)
                bar.advance(len(numbers))
            save_targets(folder, whole, teacher.vocab_size)

        def count(number: int, origin: Origin) -> None:
            if origin != "made":
                counter = bar.skip if origin == "found" else bar.advance
                counter(sizes[number])

        store = cache.store(teacher.logger.warning, teacher.ranks)
        artifacts = store.get_or_make_all(
            "targets",
            [
                cache.key_of(
                    [teacher.digest, settings, block_examples(n).digest, *more]
                )
                for n, more in enumerate(map(teacher.digests_of, blocks))
            ],
            make,
            space=lambda number: sum(sizes[number:]) * token_bytes,
            on_entry=count,
        )
    return CachedTargets([artifact.folder for artifact in artifacts], blocks, counts)


def _num_trained(example) -> int:
    return int(example.mask[1:].sum())


def _predictions(
    examples: InMemoryExamples,
    teacher: TeacherClient,
    *,
    top_k: int,
    temperature: float,
) -> Iterator[tuple[np.ndarray, TeacherTarget]]:
    """Indices and targets of all trained tokens, in chunks.

    They are those of a teacher with the tokens of the examples.
    """
    ends = np.cumsum([_num_trained(example) for example in examples])
    starts = np.concatenate([[0], ends])
    longest = int(examples.lengths.max()) - 1
    tokens = max(BATCH_TOKENS, longest)
    online, size = teacher.load(), logit_positions()
    for batch in BucketBatchSampler(
        examples, max_seq_length=longest, batch_tokens=tokens
    ).in_order():
        numbers = [np.arange(starts[m], ends[m]) for m in batch.example_indices]
        numbers, places = np.concatenate(numbers), np.flatnonzero(np.array(batch.mask))
        hidden = online.hidden(batch.tokens[:, :-1]).flatten(0, 1)
        for start in range(0, len(places), size):
            chunk = mx.array(places[start : start + size])
            logits = online.logits(hidden[chunk])[:, : teacher.vocab_size]
            target = compress_targets(logits.astype(mx.float32), top_k, temperature)
            yield numbers[start : start + size], target


class PartTargets(Sequence):
    """The predictions that `cache_part_targets` wrote, part by part.

    Attributes:
        tokens: of the parts, int32 [B, L] each.
        counted: bool [B, L] each, True where a position counts.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        tokens: Sequence[mx.array],
        counted: Sequence[mx.array],
    ):
        self.tokens = tokens
        self.counted = counted
        self._folders = folders

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, part: int) -> Batch:
        """The tokens of a part as inputs, with their targets; no next tokens."""
        tokens = mx.pad(self.tokens[part], [(0, 0), (0, 1)])
        return Batch(tokens, self.counted[part], (), target=tuple(self[part]))

    def __getitem__(self, part: int) -> TeacherTarget:
        """The target of every position of a part; its probabilities sum to one."""
        return decompress_targets(*map(mx.array, load_targets(self._folders[part])))


def cache_part_targets(
    store: ArtifactStore,
    kind: str,
    parts: Sequence[mx.array],
    teacher: Callable[[mx.array], mx.array],
    *,
    counted: Sequence[mx.array] | None = None,
    digest: str,
    top_k: int,
    vocab_size: int | None = None,
    logger: Logger,
) -> PartTargets:
    """Make the teacher's predictions for parts of a text that are not in the store.

    Args:
        store: of all ranks. They have the same parts; each predicts its share of them.
        kind: of the artifacts.
        parts: int32 [B, L] each, of any B and L.
        teacher: logits [B, L, V] of such tokens. A model computes them a few positions
            at a time.
        counted: bool [B, L] each; None = every position counts.
        digest: a hash of the teacher.
        top_k: tokens kept per position; all, if the vocabulary is smaller.
        vocab_size: only the first so many tokens are predicted; None = all.
        logger: shows the size beforehand, and the progress.

    Raises:
        UserError: the disk is too small.
    """
    if counted is None:
        counted = [mx.ones(part.shape, mx.bool_) for part in parts]
    settings = [digest, top_k, vocab_size]
    hashed = hashlib.sha256(json.dumps(settings).encode())
    for part, counts in zip(parts, counted, strict=True):
        hashed.update(json.dumps(part.shape).encode())
        hashed.update(memoryview(part.astype(mx.int32)))
        hashed.update(memoryview(counts))
    key = hashed.hexdigest()

    @lru_cache
    def trunk_and_head() -> tuple[Callable, Callable]:
        """Functions from tokens to hidden states, and from these to logits."""
        if not isinstance(teacher, nn.Module):
            return teacher, lambda logits: logits[..., :vocab_size]
        # Made when it is used: it freezes the model.
        online = OnlineTeacher(teacher)
        return online.hidden, lambda states: online.logits(states)[..., :vocab_size]

    def make(number: int, folder: Path) -> None:
        hidden, logits = trunk_and_head()
        states = hidden(parts[number])
        # Only the shape is used, so nothing is computed.
        width = logits(states[:1, :1]).shape[-1]
        require_room(bytes_per_token(top_k, width))
        target = _part_target(states, logits, top_k)
        save_targets(folder, target, width)

    @lru_cache
    def require_room(token_bytes: int) -> None:
        positions = sum(part.size for n, part in enumerate(parts) if n not in found)
        logger.info(
            f"teacher predictions for {positions:,} tokens: "
            f"{positions * token_bytes / 1e6:,.1f} MB on disk"
        )
        require_space(store.root, positions * token_bytes)

    found: set[int] = set()
    with logger.progress(len(parts), "teacher predictions") as progress:

        def count(number: int, origin: Origin) -> None:
            if origin == "found":
                found.add(number)
                progress.skip(1)
            else:
                progress.advance()

        keys = [f"{key}-{number:05d}" for number in range(len(parts))]
        artifacts = store.get_or_make_all(kind, keys, make, on_entry=count)
    return PartTargets([a.folder for a in artifacts], parts, counted)


def logit_positions() -> int:
    """Positions whose logits exist at once."""
    return CPU_LOGIT_POSITIONS if on_cpu() else LOGIT_POSITIONS


def _part_target(states: mx.array, logits: Callable, top_k: int) -> TeacherTarget:
    """The target of hidden states [B, L, ...], from the logits of some at a time."""
    flat, pieces, size = states.flatten(0, 1), [], logit_positions()
    for start in range(0, len(flat), size):
        chunk = logits(flat[start : start + size])
        pieces.append(compress_targets(chunk, top_k))
        mx.eval(pieces[-1])
    joined = map(mx.concatenate, zip(*pieces, strict=True))
    shape = states.shape[:2]
    return TeacherTarget(*(x.reshape(*shape, *x.shape[1:]) for x in joined))
