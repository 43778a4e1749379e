"""Log-probabilities of completions by the reference of a preference loss, on disk.

The reference does not change, so it runs once over every sequence. Its results are in
the cache, in blocks by the content of the sequences and the weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..data import cache
from ..data.batching import Batch, BucketBatchSampler, ExampleDataset, InMemoryExamples
from ..errors import nan_predictions
from ..files.artifacts import Origin
from ..interfaces import SINGLE_PROCESS, Communicator, Logger
from .losses import LossModel

FILE = "log_probs.npy"
# Sequences per block of the cache, and tokens per forward pass.
BLOCK_SEQUENCES, BATCH_TOKENS = 256, 2048


@dataclass(frozen=True)
class Reference:
    """The model that a preference loss compares with.

    Attributes:
        load: returns it. It is called if a result is not in the cache.
        digest: a hash of its weights and of how it computes.
        ranks: have the same model and sequences; each makes its share of the blocks.
    """

    load: Callable[[], LossModel]
    digest: str
    logger: Logger
    ranks: Communicator = SINGLE_PROCESS


def with_preference_target(
    batch: Batch, log_probs: np.ndarray | None, labels: np.ndarray | None
) -> Batch:
    """The batch with its target, zero for sequences that fill it.

    Args:
        log_probs: float32 [examples], of the reference, NaN where they are not known;
            None = the loss has no reference.
        labels: bool [examples]; None = there are none.
    """
    target, members = [], list(batch.example_indices)
    for values in (log_probs, labels):
        if values is not None:
            array = np.zeros(len(batch.tokens), values.dtype)
            array[: len(members)] = values[members]
            assert not np.isnan(array).any()
            target.append(mx.array(array))
    return replace(batch, target=tuple(target)) if target else batch


def reference_log_probs(
    examples: ExampleDataset, members: np.ndarray, reference: Reference
) -> np.ndarray:
    """Summed log-probabilities of the trained tokens, float32 [examples].

    Args:
        members: indices of the examples that are used; the others get NaN.

    Raises:
        UserError: the cache cannot be written, or the reference predicts NaN.
    """
    result = np.full(len(examples), np.nan, np.float32)
    blocks = np.split(members, range(BLOCK_SEQUENCES, len(members), BLOCK_SEQUENCES))
    logger = reference.logger
    with logger.progress(len(members), "reference log-probabilities") as bar:

        def sequences(number: int) -> InMemoryExamples:
            return InMemoryExamples(examples[index] for index in blocks[number])

        def make(number: int, folder: Path) -> None:
            model, examples = reference.load(), sequences(number)
            batches = BucketBatchSampler(
                examples,
                max_seq_length=int(examples.lengths.max()),
                batch_tokens=BATCH_TOKENS,
            )
            sums = np.zeros(len(examples), np.float32)
            for batch in batches.in_order():
                logps = mx.where(batch.mask, model.log_probs(batch.arrays()), 0.0)
                values, used = np.array(logps.sum(axis=-1)), batch.example_indices
                sums[list(used)] = values[: len(used)]
                bar.advance(len(used))
            if np.isnan(sums).any():
                raise nan_predictions("the reference")
            np.save(folder / FILE, sums)

        def count(number: int, origin: Origin) -> None:
            if origin != "made":
                counter = bar.skip if origin == "found" else bar.advance
                counter(len(blocks[number]))

        artifacts = cache.store(logger.warning, reference.ranks).get_or_make_all(
            "reference-log-probs",
            [
                cache.key_of([reference.digest, sequences(number).digest])
                for number in range(len(blocks))
            ],
            make,
            on_entry=count,
        )
    for block, artifact in zip(blocks, artifacts, strict=True):
        result[block] = np.load(artifact.folder / FILE, allow_pickle=False)
    return result
