"""AWQ (arXiv 2306.00978): scales and clipped ranges, then plain rounding.

Channels with large inputs are scaled up before the layer is rounded, which its block
makes up for elsewhere, and ranges are clipped. Both are searched on the inputs that the
quantized model has, and done only where a block then loses less on other tokens.
"""

from typing import Literal

import mlx.core as mx
from pydantic import model_validator

from ..block_folds import Folding
from ..calibrate import Stored
from ..calibrated import quantize_watched, stored
from ..clipping import clipped, group_costs
from ..fold_search import Folded, Trial, rounded
from ..folding import Weights
from ..inputs import Moments
from ..opened import Opened
from ..spec import expand, pack
from ..task import PostTraining, Task


class Config(PostTraining):
    """Fold scales, clip ranges, and round to the nearest."""

    method: Literal["awq"] = "awq"
    """The method's name."""

    @model_validator(mode="after")
    def _affine(self):
        if self.mode != "affine":
            raise ValueError(f"awq is for affine grids; {self.mode} is rounded by rtn")
        return self

    @property
    def takes_all_alike(self) -> list[str]:
        """The method as a whole."""
        return ["awq"]


def quantize(config: Config, task: Task) -> dict[str, mx.array]:
    """Codes, scales and biases of the layers in `task.specs`, as they are stored, and
    the dense weights that had a scale folded in."""
    method = _Method(task)
    tensors = quantize_watched(
        config,
        task,
        method.solve,
        method.prepare,
        compares=False,
        weighs_embeddings=False,
    )
    method.folding.sum_up()
    return tensors


class _Method:
    def __init__(self, task: Task):
        self.task = task
        self.folding = Folding(task)
        self._clipped: set[str] = set()

    def prepare(self, opened: Opened) -> Weights:
        """Fold, and find out which layers are better clipped."""
        found = self.folding.folded(opened)
        self._clipped = self._worth_clipping(opened, found)
        names = ", ".join(sorted(self._clipped)) or "none"
        self.task.report.log(f"clipped ranges in {opened.prefix}: {names}")
        return found.weights

    def solve(
        self, weights: dict[str, mx.array], moments: Moments | None
    ) -> dict[str, Stored]:
        """Round layers that share an input."""
        task, found = self.task, {}
        for path, weight in weights.items():
            if path in self._clipped and moments is not None:
                tensors = self._clip(path, weight, moments)
            else:
                tensors = pack(weight, task.specs[path], task.dtype)
            found[path] = stored(tensors, task.specs[path], task.dtype)
        return found

    def _worth_clipping(self, opened: Opened, found: Folded) -> set[str]:
        """Layers by which the block loses less when clipped, tried one by one."""
        rounding = self._rounding(opened)
        now = rounded(found.weights, opened.paths, rounding)
        least, chosen = found.after, set()
        for path in opened.paths:
            moments = _moments(found.search, found.weights, path)
            if moments is None:
                continue
            name, whole = f"{path}.weight", opened.prefix + path
            spec, dtype = self.task.specs[whole], self.task.dtype
            tensors = self._clip(whole, found.weights[name], moments)
            dense = expand(tensors, spec, dtype).astype(mx.float32)
            error = found.held.error(now | {name: dense})
            if error < least:
                now, least = now | {name: dense}, error
                chosen.add(whole)
        return chosen

    def _rounding(self, opened: Opened):
        return lambda path, weight: self.folding.rounded(opened.prefix + path, weight)

    def _clip(self, path: str, weight: mx.array, moments: Moments):
        spec, dtype = self.task.specs[path], self.task.dtype
        if weight.ndim == 2:
            costs = group_costs(moments.squares, spec.group_size)
            return clipped(weight, costs, spec, dtype)
        parts = [
            clipped(own, group_costs(squares, spec.group_size), spec, dtype)
            for own, squares in zip(weight, moments.squares, strict=True)
        ]
        return {name: mx.stack([part[name] for part in parts]) for name in parts[0]}


def _moments(trial: Trial, weights: Weights, path: str) -> Moments | None:
    """Of what goes into a layer of the block in full precision; None = nothing."""
    seen = trial.inputs(weights, [path])
    if path not in seen.rows:
        return None
    weight, rows = weights[f"{path}.weight"], seen.rows[path]
    experts = len(weight) if path in seen.experts else None
    found = Moments.empty(weight.shape[-1], experts=experts, with_cross=False)
    if experts is None:
        found.add(rows)
    else:
        found.add_routed(rows, seen.experts[path])
    return found
