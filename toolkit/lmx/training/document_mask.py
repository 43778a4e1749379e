"""An attention mask that keeps the documents of a packed sequence apart.

mlx-lm's models get the attention mask from their KV cache. In training there is no
cache to fill: a cache that only returns a mask packs every architecture that asks for
one.
"""

from collections.abc import Callable
from functools import cache, partial

import mlx.core as mx
import mlx.nn as nn

from ..models.loader import make_cache
from ..models.logit_errors import more_than_rounding

# Caches of attention over keys and values. Recurrent states have no mask.
ATTENTION_CACHES = {"KVCache", "RotatingKVCache"}


class PackingUnsupported(Exception):
    """The model does not keep the documents of a sequence apart; says why."""


class DocumentCaches:
    """Makes the caches that give a model the mask of a packed batch.

    Args:
        model: of mlx-lm, in the dtype of the training.

    Raises:
        PackingUnsupported: on random tokens, the logits of a packed document differ
            from those of the document alone.
    """

    def __init__(self, model: nn.Module):
        caches = make_cache(model)
        unknown = sorted({type(cache).__name__ for cache in caches} - ATTENTION_CACHES)
        if unknown:
            raise PackingUnsupported(
                f"its layers keep a state of another kind, {unknown[0]}"
            )
        self._window_sizes = [getattr(cache, "max_size", None) for cache in caches]
        self._verify(model)

    def __call__(self, documents: mx.array) -> list["_MaskCache"]:
        """One cache per layer.

        Args:
            documents: int [B, L], the number of the document of every position.
        """
        # Each mask is made once for all layers.
        mask_of = cache(partial(_mask, documents))
        return [_MaskCache(mask_of, size) for size in self._window_sizes]

    def _verify(self, model: nn.Module) -> None:
        training = model.training
        model.eval()
        key = mx.random.key(0)
        # Two sequences, because some models mix up masks and heads only in batches.
        first, second = (mx.random.randint(0, 64, (2, n), key=key) for n in (7, 12))
        tokens = mx.concatenate([first, second, mx.zeros((2, 3), mx.int32)], axis=1)
        documents = mx.array([[0] * 7 + [1] * 12 + [2] * 3] * 2)
        alone = mx.concatenate([model(first), model(second)], axis=1)
        try:
            packed = model(tokens, cache=self(documents))[:, :19]
        except (AttributeError, TypeError, ValueError) as error:
            reason = f"it uses its cache for more than a mask: {error}"
            raise PackingUnsupported(reason) from None
        finally:
            model.train(training)
        if error := more_than_rounding(packed, alone):
            raise PackingUnsupported(f"logits of a packed document are {error}")


def _mask(documents: mx.array, window_size: int | None) -> mx.array:
    """Bool [B, 1, L, L], True where a position (axis 2) attends to another."""
    positions = mx.arange(documents.shape[1])
    distance = positions[:, None] - positions[None]
    causal = distance >= 0
    if window_size is not None:
        causal = causal & (distance < window_size)
    same = documents[:, :, None] == documents[:, None, :]
    return (same & causal)[:, None]


class _MaskCache:
    """The cache of a layer, which holds only a mask and no earlier tokens."""

    offset = 0

    def __init__(
        self, mask_of: Callable[[int | None], mx.array], window_size: int | None
    ):
        self._mask_of = mask_of
        self._window_size = window_size

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array:
        """The mask, as mlx-lm's caches make it; always an array."""
        return self._mask_of(window_size or self._window_size)

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Keys and values unchanged."""
        return keys, values
