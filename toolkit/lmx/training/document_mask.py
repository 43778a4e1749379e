"""Attention kept inside each document of a packed row.

mlx-lm's models ask their cache for the attention mask. In training there is no cache to
fill, so one that only answers that question packs every architecture that asks it.
"""

import mlx.core as mx
import mlx.nn as nn

from ..models.loader import make_cache

# The kinds of cache of attention that sees keys and values alone, none summed up.
ATTENTION = {"KVCache", "RotatingKVCache"}


class PackingUnsupported(Exception):
    """The model does not keep the documents of a row apart; says why."""


class DocumentCaches:
    """Makes the caches that give a model the mask of a packed row.

    Args:
        model: of mlx-lm, in the state it is trained in.

    Raises:
        CannotPack: on random tokens, a document's logits in a packed row are not those
            of the document alone.
    """

    def __init__(self, model: nn.Module):
        kinds = make_cache(model)
        strange = sorted({type(kind).__name__ for kind in kinds} - ATTENTION)
        if strange:
            raise PackingUnsupported(
                f"its layers keep a state of another kind, {strange[0]}"
            )
        self._windows = [getattr(kind, "max_size", None) for kind in kinds]
        self._verify(model)

    def __call__(self, documents: mx.array) -> list["_Cache"]:
        """One cache for every layer.

        Args:
            documents: int [B, L], the number of every position's document.
        """
        masks = _Masks(documents)
        return [_Cache(masks, window) for window in self._windows]

    def _verify(self, model: nn.Module) -> None:
        training = model.training
        model.eval()
        draw = mx.random.key(0)
        # Two rows, for which some models bring the heads' masks in disorder.
        first, second = (mx.random.randint(0, 64, (2, n), key=draw) for n in (7, 12))
        row = mx.concatenate([first, second, mx.zeros((2, 3), mx.int32)], axis=1)
        documents = mx.array([[0] * 7 + [1] * 12 + [2] * 3] * 2)
        alone = mx.concatenate([model(first), model(second)], axis=1)
        try:
            packed = model(row, cache=self(documents))[:, :19]
        except (AttributeError, TypeError, ValueError) as error:
            raise PackingUnsupported(f"it wants more of its cache: {error}") from None
        finally:
            model.train(training)
        alone, packed = alone.astype(mx.float32), packed.astype(mx.float32)
        exact = packed.dtype == mx.float32 and alone.dtype == mx.float32
        allowed = (1e-4 if exact else 2**-6) * max(1.0, mx.abs(alone).max().item())
        off = mx.abs(packed - alone).max().item()
        if not off <= allowed:
            raise PackingUnsupported(
                f"logits of a packed document are off by {off:.2g}"
            )


class _Masks:
    """The masks of a packed batch, each made once for all layers."""

    def __init__(self, documents: mx.array):
        self._documents = documents
        self._made: dict[int | None, mx.array] = {}

    def __call__(self, window: int | None) -> mx.array:
        """Bool [B, 1, L, L], True where a position (row) sees another (column)."""
        if window not in self._made:
            documents = self._documents
            places = mx.arange(documents.shape[1])
            behind = places[:, None] - places[None]
            sees = behind >= 0
            if window is not None:
                sees = sees & (behind < window)
            same = documents[:, :, None] == documents[:, None, :]
            self._made[window] = (same & sees)[:, None]
        return self._made[window]


class _Cache:
    """What a layer finds in its cache's place: a mask, and nothing before the row."""

    offset = 0

    def __init__(self, masks: _Masks, window: int | None):
        self._masks = masks
        self._window = window

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array:
        """The mask in mlx-lm's manner; always an array."""
        return self._masks(window_size or self._window)

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Keys and values as they came."""
        return keys, values
