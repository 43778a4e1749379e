"""Arrays of all layers end to end, so that one kernel works on all of them."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod

import mlx.core as mx


class Vectors:
    """Between arrays by name, `layer.kind`, and one vector of each kind.

    Args:
        kinds: every layer has an array of each, of the layer's one shape.
        shapes: by layer; vectors have the layers in this order.
    """

    def __init__(self, kinds: Sequence[str], shapes: Mapping[str, tuple[int, ...]]):
        self._kinds = kinds
        self._shapes = shapes
        self._sizes = {path: prod(shape) for path, shape in shapes.items()}

    def joined(self, named: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """One float32 vector [N] of each kind."""
        return {
            kind: mx.concatenate(
                [
                    named[f"{p}.{kind}"].astype(mx.float32).reshape(-1)
                    for p in self._shapes
                ]
            )
            for kind in self._kinds
        }

    def cut(self, vectors: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The arrays that `joined` made these of, by name."""
        ends = list(accumulate(self._sizes.values()))[:-1]
        return {
            f"{path}.{kind}": part.reshape(shape)
            for kind in self._kinds
            for part, (path, shape) in zip(
                mx.split(vectors[kind], ends), self._shapes.items(), strict=True
            )
        }

    def spread(self, values: Mapping[str, mx.array | float]) -> mx.array:
        """A vector [N] with the number of a layer at each of its places."""
        return mx.concatenate(
            [mx.full(size, values[p], mx.float32) for p, size in self._sizes.items()]
        )
