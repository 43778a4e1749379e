"""Folding scales into the blocks of a model, one after the other."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from .fold_search import Folded, Rounding, Trial, fold_scales
from .folding import Fold, Run, Weights, find_folds, holds, put


@dataclass(frozen=True)
class Opened:
    """A block that is about to be quantized.

    Attributes:
        prefix: what its paths begin with in the model.
        weights: float32, its parameters by name in it.
        paths: in it, of the layers to quantize.
        run: gives what it makes of hidden states of the first rows of a part.
        parts: hidden states [B, L, width] as the quantized model has them, and `run`
            for them: those to search on and those held apart.
    """

    prefix: str
    block: nn.Module
    weights: Weights
    paths: list[str]
    parts: tuple[tuple[Run, mx.array], tuple[Run, mx.array]]


class Folding:
    """Finds the places, searches the scales, and tells what came of it.

    Args:
        rounding: the weight a layer, by its path in the model, is left with.
        dtype: the type the checkpoint stores.
    """

    def __init__(self, rounding: Rounding, dtype: mx.Dtype, say: Callable[[str], None]):
        self.rounding, self.dtype, self.say = rounding, dtype, say
        self.blocks = self.places = self.done = 0
        # By the names and shapes of a block's parameters.
        self._known: dict[tuple, list[Fold]] = {}

    def __call__(self, opened: Opened) -> Folded:
        """Fold what helps; the block is left with weights of a trial."""
        put(opened.block, opened.weights)
        folds = self._folds(opened)
        search, held = (Trial.of(opened.block, *part) for part in opened.parts)
        found = fold_scales(
            folds,
            opened.weights,
            opened.paths,
            lambda path, weight: self.rounding(opened.prefix + path, weight),
            search,
            held,
            self.dtype,
        )
        self.blocks += 1
        self.places += len(folds)
        self.done += len(found.folds)
        self._tell(opened, folds, found)
        return found

    def sum_up(self) -> None:
        """One line for all blocks."""
        self.say(
            f"scales folded into {self.done} of {self.places} places of "
            f"{self.blocks} blocks"
        )

    def _folds(self, opened: Opened) -> list[Fold]:
        shapes = tuple((name, *v.shape) for name, v in opened.weights.items())
        run, hidden = opened.parts[0]
        arguments = opened.block, run, hidden[:1]
        known = self._known.get(shapes)
        if known is None or not holds(known, *arguments):
            known = self._known[shapes] = find_folds(*arguments)
        return known

    def _tell(self, opened: Opened, folds: list[Fold], found: Folded) -> None:
        where = ", ".join(fold.producer for fold in found.folds) or "nothing"
        self.say(
            f"{opened.prefix.rstrip('.')}: scales folded into {len(found.folds)} of "
            f"{len(folds)} places ({where}); rounding loses {found.after:.3g} of the "
            f"block's output, {found.before:.3g} without"
        )
