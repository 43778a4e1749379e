"""Training batches of drafters: completions with the target's hidden states."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ..data import cache
from ..data.batching import Batch
from ..files.artifacts import Origin
from ..files.atomic import require_space
from ..interfaces import Logger
from ..models.hooks import forward_with_hidden_states
from .dataset import DistillationBatches

KIND, FILE, NAME = "hidden_states", "states.safetensors", "states"
# The largest value that is stored as float16, which is more exact than bfloat16.
MAX_FLOAT16 = 6e4
BYTES_PER_VALUE = 2


class HiddenStateRecorder:
    """A target that predicts for a distillation; its hidden states can be kept.

    So one forward pass gives both.

    Attributes:
        on_states: called with the tokens [B, L] and hidden states [B, L, n * width] of
            every prediction; None = they are not computed.
    """

    def __init__(self, model: nn.Module, layer_ids: Sequence[int]):
        self.model = model
        self.layer_ids = tuple(layer_ids)
        self.on_states: Callable[[mx.array, mx.array], None] | None = None

    def __call__(self, tokens: mx.array) -> mx.array:
        """Logits [B, L, V] of tokens [B, L]."""
        if self.on_states is None:
            return self.model(tokens)
        logits, states = forward_with_hidden_states(self.model, tokens, self.layer_ids)
        self.on_states(tokens, states)
        return logits

    def states(self, tokens: mx.array) -> mx.array:
        """Hidden states [B, L, n * width] alone."""
        return forward_with_hidden_states(self.model, tokens, self.layer_ids)[1]


class HiddenStateBatches:
    """The batches of a distillation; their targets end with the hidden states.

    These come from a cache on disk, by a hash of the tokens, or from the forward pass
    of every batch.

    Args:
        batches: with the predictions of `target`.
        width: of one hidden state.
        key: hash of the target.
        max_bytes: largest cache.
        logger: logs the size, and the progress of the cache.
    """

    def __init__(
        self,
        batches: DistillationBatches,
        target: HiddenStateRecorder,
        *,
        width: int,
        key: str,
        max_bytes: float,
        logger: Logger,
    ):
        self._batches = batches
        self._target = target
        self._key = cache.key_of([key, target.layer_ids])
        self.digest = cache.key_of([batches.digest, target.layer_ids])
        self._store = cache.store(logger.warning, batches.ranks)
        tokens = sum(batches.tokens_of(index).size for index in range(len(batches)))
        size = tokens * len(target.layer_ids) * width * BYTES_PER_VALUE
        self._is_cached = size <= max_bytes
        place = "cached on disk" if self._is_cached else "computed in every step"
        logger.info(f"hidden states of {tokens:,} tokens: {size / 1e9:.2f} GB, {place}")
        if not self._is_cached:
            # Their forward passes would give the states of other batches.
            batches.cache_targets()
            return
        # What is missing or damaged is computed, in the same forward passes as
        # predictions that are missing.
        require_space(self._store.root, size)
        target.on_states = lambda tokens, states: self._store.get_or_make(
            KIND, self._key_of(tokens), lambda folder: _save(folder / FILE, states)
        )
        batches.cache_targets()
        target.on_states = None
        all_tokens = map(batches.tokens_of, range(len(batches)))
        tokens_by_key = {self._key_of(tokens): tokens for tokens in all_tokens}
        keys = list(tokens_by_key)

        def make(number: int, folder: Path) -> None:
            _save(folder / FILE, target.states(tokens_by_key[keys[number]]))

        with logger.progress(len(keys), "hidden states") as progress:

            def count(number: int, origin: Origin) -> None:
                counter = progress.skip if origin == "found" else progress.advance
                counter(1)

            self._store.get_or_make_all(KIND, keys, make, on_entry=count)

    def __len__(self) -> int:
        return len(self._batches)

    def __call__(self, step: int) -> Batch:
        """The batch of a step, from 0, over any number of epochs."""
        return self[self._batches.index_of(step)]

    def __getitem__(self, index: int) -> Batch:
        tokens = self._batches.tokens_of(index)
        if self._is_cached:
            batch = self._batches[index]
            folder = self._store.folder(KIND, self._key_of(tokens))
            states = mx.load(str(folder / FILE))[NAME].astype(mx.float32)
        else:
            # If the target predicts now, the same forward pass gives its states.
            recorded: list[mx.array] = []
            self._target.on_states = lambda _, states: recorded.append(states)
            batch = self._batches[index]
            self._target.on_states = None
            states = recorded[-1] if recorded else self._target.states(tokens)
        predictions = [part for part in batch.target if part is not None]
        return replace(batch, target=(*predictions, states))

    def __iter__(self) -> Iterator[Batch]:
        return (self[index] for index in range(len(self)))

    def _key_of(self, tokens: mx.array) -> str:
        """The key of the hidden states of a batch."""
        return cache.key_of([self._key, tokens.tolist()])


def _save(file: Path, states: mx.array) -> None:
    largest = mx.abs(states).max().item()
    dtype = mx.float16 if largest < MAX_FLOAT16 else mx.bfloat16
    mx.save_safetensors(str(file), {NAME: states.astype(dtype)})
