"""Folding scales into the blocks of a model, one after the other."""

import mlx.core as mx

from .fold_search import Folded, Trial, fold_scales
from .folding import Fold, Weights, find_folds, holds, put
from .opened import Opened
from .spec import expand, pack
from .task import Task


class Folding:
    """Finds the places, searches the scales, and tells what came of it."""

    def __init__(self, task: Task):
        self.task = task
        self.blocks = self.places = self.done = 0
        # By the names and shapes of a block's parameters.
        self._known: dict[tuple, list[Fold]] = {}

    def __call__(self, opened: Opened) -> Weights:
        """The block's weights with all scales folded in that are of use."""
        return self.folded(opened).weights

    def folded(self, opened: Opened) -> Folded:
        """The same, and how much it helps."""
        put(opened.block, opened.weights)
        folds = self._folds(opened)
        search, held = (Trial.of(opened.block, *part) for part in opened.parts)
        found = fold_scales(
            folds,
            opened.weights,
            opened.paths,
            lambda path, weight: self.rounded(opened.prefix + path, weight),
            search,
            held,
            opened.dtypes,
        )
        self._tell(opened, folds, found)
        return found

    def rounded(self, path: str, weight: mx.array) -> mx.array:
        """What a layer's weight stands for once it is rounded to the nearest."""
        spec, dtype = self.task.specs[path], self.task.dtype
        return expand(pack(weight, spec, dtype), spec, dtype).astype(mx.float32)

    def sum_up(self) -> None:
        """One line for all blocks."""
        self.task.report.say(
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
        # What nobody rounds gains nothing by a scale.
        rounded = set(opened.paths)
        return [fold for fold in known if rounded.intersection(fold.consumers)]

    def _tell(self, opened: Opened, folds: list[Fold], found: Folded) -> None:
        self.blocks += 1
        self.places += len(folds)
        self.done += len(found.folds)
        where = ", ".join(fold.producer for fold in found.folds) or "nothing"
        self.task.report.say(
            f"{opened.prefix.rstrip('.')}: scales folded into {len(found.folds)} of "
            f"{len(folds)} places ({where}); rounding loses {found.after:.3g} of the "
            f"block's output, {found.before:.3g} without"
        )
