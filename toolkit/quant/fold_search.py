"""Scales worth folding: those that bring the rounded block nearer to what it was.

AWQ (arXiv 2306.00978): a channel's scale is a power of the mean size of its inputs.
The power is searched on some tokens, and whether the scale is folded at all is decided
on others.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from .folding import Fold, Run, Weights, put
from .inputs import Seen, watched

POWERS = tuple(step / 20 for step in range(1, 21))
# The least mean size of a channel's inputs, as a share of the largest.
LEAST_MEAN = 1e-4

# What the weight of a layer stands for once it is stored.
Rounding = Callable[[str, mx.array], mx.array]


@dataclass(frozen=True)
class Trial:
    """A block on some hidden states.

    Attributes:
        hidden: [B, L, width].
        target: what the block makes of them before anything is rounded.
    """

    block: nn.Module
    run: Run
    hidden: mx.array
    target: mx.array

    @classmethod
    def of(cls, block: nn.Module, run: Run, hidden: mx.array) -> "Trial":
        target = run(hidden)
        mx.eval(target)
        return cls(block, run, hidden, target)

    def error(self, weights: Weights) -> float:
        """Squared distance of the output from the target, as a share of it."""
        put(self.block, weights)
        off = mx.square(self.run(self.hidden) - self.target).sum()
        return (off / mx.square(self.target - self.hidden).sum()).item()

    def inputs(self, weights: Weights, paths: list[str]) -> Seen:
        """What goes into layers."""
        put(self.block, weights)
        with watched(self.block, paths) as seen:
            self.run(self.hidden)
        return seen


def rounded(weights: Weights, paths: list[str], rounding: Rounding) -> Weights:
    """A block's parameters with those of layers rounded."""
    names = {path: f"{path}.weight" for path in paths}
    return weights | {n: rounding(path, weights[n]) for path, n in names.items()}


@dataclass(frozen=True)
class Folded:
    """What a search came to.

    Attributes:
        weights: all parameters of the block.
        folds: those that were done.
        before: error of the rounded block on the tokens held apart, without them.
        after: and with them.
        search: the trial that chose scales.
        held: the one on the tokens held apart.
    """

    weights: Weights
    folds: list[Fold]
    before: float
    after: float
    search: Trial
    held: Trial


def fold_scales(
    folds: list[Fold],
    weights: Weights,
    paths: list[str],
    rounding: Rounding,
    search: Trial,
    held: Trial,
    dtypes: dict[str, mx.Dtype],
) -> Folded:
    """Fold the scales that make a block lose less by rounding.

    Args:
        weights: float32, of the block; it has other ones afterwards.
        paths: of the layers that will be rounded.
        search: on tokens that choose a scale.
        held: on tokens that say whether it is any use; they see all layers rounded.
        dtypes: what the parameters are stored in.
    """
    before = least = held.error(rounded(weights, paths, rounding))
    done = []
    for fold in folds:
        scale = _best_scale(fold, weights, paths, rounding, search)
        if scale is None:
            continue
        scale = fold.storable(weights, scale, dtypes[f"{fold.producer}.weight"])
        tried = weights | fold.moved(weights, scale)
        error = held.error(rounded(tried, paths, rounding))
        if error < least:
            weights, least = tried, error
            done.append(fold)
    return Folded(weights, done, before, least, search, held)


def _best_scale(fold: Fold, weights: Weights, paths, rounding, search: Trial):
    """The scale with which its consumers, rounded, lose least; None = none at all."""
    fed = [path for path in fold.consumers if path in paths]
    sizes = _sizes(fold, search.inputs(weights, [fold.consumers[0]]))
    least, best = search.error(rounded(weights, fed, rounding)), None
    for power in POWERS:
        scale = scale_of(sizes, power)
        tried = weights | fold.moved(weights, scale)
        error = search.error(rounded(tried, fed, rounding))
        if error < least:
            least, best = error, scale
    return best


def _sizes(fold: Fold, seen: Seen) -> mx.array:
    """Mean size of the inputs by channel, of the shape of the fold's scale."""
    path = fold.consumers[0]
    rows = mx.abs(seen.rows[path])
    if fold.experts is None:
        return rows.mean(axis=0)
    experts = seen.experts[path]
    sums = mx.zeros(fold.shape).at[experts].add(rows)
    counts = mx.zeros((fold.experts, 1)).at[experts].add(mx.array(1.0))
    return sums / mx.maximum(counts, 1)


def scale_of(sizes: mx.array, power: float) -> mx.array:
    """Sizes to a power, around 1; all 1 where nothing was seen."""
    largest = sizes.max(axis=-1, keepdims=True)
    sizes = mx.where(largest == 0, 1, mx.maximum(sizes, LEAST_MEAN * largest))
    scale = sizes**power
    ends = scale.max(axis=-1, keepdims=True) * scale.min(axis=-1, keepdims=True)
    return scale / mx.sqrt(ends)
