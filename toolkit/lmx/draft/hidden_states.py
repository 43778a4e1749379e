"""Training batches of drafters: completions with the target's hidden states."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ..data import cache
from ..data.batching import Batch
from ..models.hidden_states import forward_with_hidden_states
from ..run.folder_index import read_index, write_index
from ..run.fs import atomic_folder, remove, require_space
from ..run.logger import RunLogger
from .dataset import DistillationBatches

FILE, NAME = "states.safetensors", "states"
# The largest value that is stored as float16, which is more exact than bfloat16.
MAX_FLOAT16 = 6e4
BYTES_PER_VALUE = 2


class HiddenStateBatches:
    """The batches of a distillation; their targets end with the hidden states.

    These come from a cache on disk, or the target runs for every batch.

    Args:
        batches: with the target's predictions.
        target: the model.
        width: of one hidden state.
        key: hash of the target.
        max_bytes: largest cache.
        logger: logs the size, and the progress of the cache.
    """

    def __init__(
        self,
        batches: DistillationBatches,
        target: nn.Module,
        layer_ids: Sequence[int],
        *,
        width: int,
        key: str,
        max_bytes: float,
        logger: RunLogger,
    ):
        self._batches = batches
        self._target = target
        self._layer_ids = tuple(layer_ids)
        self.digest = cache.key_of([batches.digest, list(layer_ids)])
        self._folder: Path | None = None
        tokens = sum(batches.tokens_of(index).size for index in range(len(batches)))
        size = tokens * len(layer_ids) * width * BYTES_PER_VALUE
        place = "cached on disk" if size <= max_bytes else "computed in every step"
        logger.info(f"hidden states of {tokens:,} tokens: {size / 1e9:.2f} GB, {place}")
        if size <= max_bytes:
            entry = cache.key_of([key, self.digest])
            with cache.locked_folder("hidden_states", entry) as folder:
                self._fill(folder, size, logger)
                self._folder = folder

    def __len__(self) -> int:
        return len(self._batches)

    def __call__(self, step: int) -> Batch:
        """The batch of a step, from 0, over any number of epochs."""
        return self[self._batches.index_of(step)]

    def __getitem__(self, index: int) -> Batch:
        batch = self._batches[index]
        predictions = [part for part in batch.target if part is not None]
        states = self._load(index) if self._folder else self._compute(index)
        return replace(batch, target=(*predictions, states))

    def __iter__(self) -> Iterator[Batch]:
        return (self[index] for index in range(len(self)))

    def _compute(self, index: int) -> mx.array:
        """Hidden states [B, L, n * width]."""
        tokens = self._batches.tokens_of(index)
        return forward_with_hidden_states(self._target, tokens, self._layer_ids)[1]

    def _load(self, index: int) -> mx.array:
        states = mx.load(str(self._folder / f"{index:05d}" / FILE))[NAME]
        return states.astype(mx.float32)

    def _fill(self, folder: Path, size: int, logger: RunLogger) -> None:
        """Compute the batches whose files are missing or damaged."""
        require_space(folder, size)
        with logger.progress(len(self), "hidden states") as progress:
            for index in range(len(self)):
                place, key = folder / f"{index:05d}", f"{self.digest} {index}"
                if read_index(place, key) is None:
                    remove(place)
                    with atomic_folder(place) as partial:
                        _save(partial / FILE, self._compute(index))
                        write_index(partial, key, {})
                progress.advance()


def _save(file: Path, states: mx.array) -> None:
    largest = mx.abs(states).max().item()
    dtype = mx.float16 if largest < MAX_FLOAT16 else mx.bfloat16
    mx.save_safetensors(str(file), {NAME: states.astype(dtype)})
