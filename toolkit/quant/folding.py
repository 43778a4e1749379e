"""Where a block lets a scale per channel pass from one layer into those that follow.

A norm, or a linear layer, has its outputs divided by the scale and the layers it feeds
have their columns multiplied, so the block computes what it did (arXiv 2306.00978,
section 3.2). No table of names says where that holds: it is tried.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from .inputs import Seen, watched

TOLERANCE = 1e-4

# A block's parameters by name inside it.
Weights = dict[str, mx.array]
# Hidden states [B, L, width] to what the block makes of them.
Run = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class Fold:
    """A place for a scale.

    Attributes:
        producer: path in the block of the layer whose outputs are divided.
        consumers: paths of all that is fed by it, whose columns are multiplied.
        width: how many channels are scaled.
        start: the first of them among the producer's outputs.
        offset: what the block adds to the producer's weight before it is used.
        experts: how many the producer is a mixture of; each has its own scale.
    """

    producer: str
    consumers: tuple[str, ...]
    width: int
    start: int = 0
    offset: int = 0
    experts: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the scale: [width], or [experts, width]."""
        return (self.width,) if self.experts is None else (self.experts, self.width)

    def moved(self, weights: Weights, scale: mx.array) -> Weights:
        """The parameters that change, with a positive scale of `shape` folded in."""
        name = f"{self.producer}.weight"
        found = {f"{path}.weight": weights[f"{path}.weight"] for path in self.consumers}
        found = {path: value * scale[..., None, :] for path, value in found.items()}
        weight, share = weights[name], self._shares(weights[name], scale)
        if weight.ndim == 1:
            found[name] = (weight + self.offset) * share - self.offset
        else:
            found[name] = weight * share[..., None]
        bias = f"{self.producer}.bias"
        return found | ({bias: weights[bias] * share} if bias in weights else {})

    def _shares(self, weight: mx.array, scale: mx.array) -> mx.array:
        """What every output of the producer is multiplied by."""
        outputs = weight.shape[0] if weight.ndim == 1 else weight.shape[-2]
        after = outputs - self.start - self.width
        padding = [(0, 0)] * (scale.ndim - 1) + [(self.start, after)]
        return mx.pad(1 / scale, padding, constant_values=1)

    def storable(self, weights: Weights, scale: mx.array, dtype: mx.Dtype) -> mx.array:
        """The scale next to `scale` that a norm's weights in `dtype` stand for."""
        weight = weights[f"{self.producer}.weight"]
        if weight.ndim > 1:
            return scale
        stored = ((weight + self.offset) / scale - self.offset).astype(dtype)
        stored = stored.astype(mx.float32) + self.offset
        found = (weight + self.offset) / mx.where(stored == 0, 1, stored)
        return mx.where((stored == 0) | (found <= 0), scale, found)


def find_folds(block: nn.Module, run: Run, hidden: mx.array) -> list[Fold]:
    """All places of a block, found by folding a random scale.

    Args:
        block: its parameters are float32; they are left as they were.
        hidden: float32 [B, L, width], a few tokens' worth.
    """
    return _Finder(block, run, hidden).found()


def holds(folds: list[Fold], block: nn.Module, run: Run, hidden: mx.array) -> bool:
    """Whether folds leave the output of this block, too, as it was."""
    finder = _Finder(block, run, hidden)
    weights = finder.weights
    for fold in folds:
        weights = weights | fold.moved(weights, _trial(fold))
    return finder.is_unchanged(finder.seen_with(weights)[0])


def put(block: nn.Module, weights: Weights) -> None:
    """Give a block other parameters, by their names in it."""
    block.update(tree_unflatten(list(weights.items())))


class _Finder:
    def __init__(self, block: nn.Module, run: Run, hidden: mx.array):
        self.block, self.run, self.hidden = block, run, hidden
        self.weights = dict(tree_flatten(block.parameters()))
        self.producers = {
            path: module.weight
            for path, module in block.named_modules()
            if "weight" in module
            and (module.weight.ndim == 1 or hasattr(module, "to_quantized"))
        }
        self.layers = [path for path, module in block.named_modules() if _reads(module)]
        self.output, self.before = self.seen_with(self.weights)
        # In the order of their calls.
        called = list(self.before.rows)
        # What these tokens do not call might be fed as well: their widths are left out.
        idle = {self._columns(path) for path in self.layers if path not in called}
        self.layers = called
        self.widths = {self._columns(path) for path in called} - idle

    def found(self) -> list[Fold]:
        folds: dict[tuple, Fold] = {}
        for candidate in self._candidates():
            place = candidate.producer, candidate.start, candidate.width
            fold = None if place in folds else self._completed(candidate)
            if fold is not None:
                folds[place] = fold
        return sorted(folds.values(), key=self._call)

    def _candidates(self) -> Iterator[Fold]:
        for path, weight in self.producers.items():
            if weight.ndim == 1 and weight.size in self.widths:
                yield Fold(path, (), weight.size)
                yield Fold(path, (), weight.size, offset=1)
            elif weight.ndim == 2 or path in self.before.experts:
                outputs = weight.shape[-2]
                experts = len(weight) if path in self.before.experts else None
                for width in self.widths:
                    # A layer that is several in one has the values last.
                    if outputs % width == 0:
                        yield Fold(path, (), width, outputs - width, experts=experts)

    def _completed(self, fold: Fold) -> Fold | None:
        """The fold with all its consumers, if there are any and the output stays."""
        scale = _trial(fold)
        while True:
            changed = self.weights | fold.moved(self.weights, scale)
            output, now = self.seen_with(changed)
            # Experts are met in the same order only once their router is scaled.
            more = [
                path
                for path in self.layers
                if path not in fold.consumers and self._is_fed(path, fold, scale, now)
            ]
            if not more:
                break
            fold = replace(fold, consumers=(*fold.consumers, *more))
        return fold if fold.consumers and self.is_unchanged(output) else None

    def _is_fed(self, path: str, fold: Fold, scale: mx.array, now: Seen) -> bool:
        """Whether a layer's input is divided by the scale."""
        before, after = (seen.rows.get(path) for seen in (self.before, now))
        if before is None or after is None or before.shape != after.shape:
            return False
        # A layer may be used transposed, too.
        if {before.shape[-1], self._columns(path)} != {fold.width}:
            return False
        if fold.experts is not None:
            weight = self.weights[f"{path}.weight"]
            if path not in now.experts or len(weight) != fold.experts:
                return False
            scale = scale[now.experts[path]]
        return _is_near(after * scale, before, mx.linalg.norm(before))

    def _columns(self, path: str) -> int:
        return self.weights[f"{path}.weight"].shape[-1]

    def _call(self, fold: Fold) -> int:
        """When what it feeds is called."""
        return self.layers.index(fold.consumers[0])

    def seen_with(self, weights: Weights) -> tuple[mx.array, Seen]:
        put(self.block, weights)
        with watched(self.block, self.layers) as seen:
            output = self.run(self.hidden)
        put(self.block, self.weights)
        mx.eval(output, seen.rows)
        return output, seen

    def is_unchanged(self, output: mx.array) -> bool:
        # By what the block adds: hidden states may have channels that drown all else.
        added = mx.linalg.norm(self.output - self.hidden)
        return _is_near(output, self.output, added)


def _reads(module: nn.Module) -> bool:
    """Whether a module multiplies its input by a weight [..., K]: a router may, too."""
    is_leaf = "weight" in module and not module.children()
    if not is_leaf or isinstance(module, nn.Embedding):
        return False
    return hasattr(module, "to_quantized") or module.weight.ndim == 2


def _is_near(value: mx.array, other: mx.array, size: mx.array) -> bool:
    off = mx.linalg.norm(value - other)
    return bool(((size > 0) & (off <= TOLERANCE * size)).item())


def _trial(fold: Fold) -> mx.array:
    """Powers of two, which no floating-point type rounds, and none of them 1."""
    key = mx.random.key(fold.width)
    powers = mx.random.randint(0, 4, fold.shape, key=key)
    return mx.array([0.25, 0.5, 2.0, 4.0])[powers]
