"""Which grids fit into a budget: what they weigh, and choices of them by layer."""

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ...config.quant_spec import QuantSpec
from ...config.quantize import MixedPrecisionConfig
from ...errors import UserError
from ..packing import packed_bytes
from ..ptq.base import PTQContext
from ..target_layers import QuantizationPlan
from . import knapsack

# Predictions hold for small errors, and where one layer is rounded alone; choices are
# made of these powers of them, too.
POWERS = (0.85, 1.15)

# The class of a mixture's linear layers, by name: only the loader may import mlx-lm.
EXPERTS = "SwitchLinear"

# Grids by path.
SpecByLayer = dict[str, QuantSpec]


@dataclass(frozen=True)
class SizeModel:
    """What a model weighs on any grids, to the byte.

    Attributes:
        weights: numbers the model has.
        dense: bytes as it is.
        fixed: bytes of all but the free layers, as they will be written.
        free: numbers of every layer that a grid is chosen for, by path.
        options: the grids each of them could have.
        dtype: the type of scales.
    """

    weights: int
    dense: int
    fixed: int
    free: dict[str, int]
    options: dict[str, list[QuantSpec]]
    dtype: mx.Dtype

    @classmethod
    def of(
        cls, task: PTQContext, selection: QuantizationPlan, budget: MixedPrecisionConfig
    ) -> "SizeModel":
        """Of a task's model.

        A layer that no grid of the budget fits keeps its own, and so do those whose
        use of their weights is unknown: with three dimensions, but no experts.
        """
        grids = [
            QuantSpec(bits=bits, group_size=group)
            for bits in sorted(set(budget.candidate_bits))
            for group in sorted(set(budget.candidate_group_sizes))
        ]
        named = dict(tree_flatten(task.model.parameters()))
        modules = dict(task.model.named_modules())
        options, fixed = {}, 0
        for name, value in named.items():
            path = name.removesuffix(".weight")
            is_layer = name != path and path in selection.specs
            width = value.shape[-1] if value.ndim else 0
            fitting = [spec for spec in grids if spec.fits(width)]
            is_known = value.ndim == 2 or type(modules.get(path)).__name__ == EXPERTS
            is_free = is_layer and is_known and path not in selection.asked
            if is_free and fitting:
                options[path] = fitting
            elif is_layer:
                fixed += packed_bytes(value.size, selection.specs[path], task.dtype)
            else:
                fixed += value.nbytes
        return cls(
            sum(value.size for value in named.values()),
            sum(value.nbytes for value in named.values()),
            fixed,
            {path: named[f"{path}.weight"].size for path in options},
            options,
            task.dtype,
        )

    def size(self, path: str, spec: QuantSpec) -> int:
        """Bytes of one layer on a grid."""
        return packed_bytes(self.free[path], spec, self.dtype)

    def bytes(self, grids: SpecByLayer) -> int:
        """Bytes of the whole model on these grids."""
        return self.fixed + sum(self.size(path, spec) for path, spec in grids.items())

    def bits(self, size: int) -> float:
        """Bits per weight of a model of so many bytes."""
        return 8 * size / self.weights

    def limit(self, budget: MixedPrecisionConfig) -> int:
        """The budget in bytes.

        Raises:
            UserError: no choice fits into it, or the model as it is does.
        """
        limit = budget.max_bytes(self.weights)
        if limit >= self.dense:
            raise UserError(
                f"the budget of {limit:,} bytes holds the unquantized model, which has "
                f"{self.dense:,} ({self.bits(self.dense):.4g} bits per weight)",
                hint="give a smaller budget, or leave this stage out",
            )
        smallest = self.fixed + sum(
            min(self.size(path, spec) for spec in specs)
            for path, specs in self.options.items()
        )
        if limit < smallest:
            bits = math.ceil(1000 * self.bits(smallest)) / 1000
            raise UserError(
                f"no choice of grids fits into {limit:,} bytes "
                f"({self.bits(limit):.4g} bits per weight)",
                hint=f"the smallest possible is {smallest:,} bytes, or {bits:g} bits "
                "per weight",
            )
        return limit


def candidate_plans(
    weighing: SizeModel, groups: list[list[str]], costs: dict[str, list[float]], limit
) -> dict[str, SpecByLayer]:
    """Grids of all free layers that fit into `limit` bytes, by how they were chosen.

    Args:
        groups: layers that share their input, and so a grid.
        costs: what every option of a layer is expected to cost.
    """
    unmet = [[path] for path in weighing.free if path not in costs]
    costs = _completed(weighing, costs)
    alone = [[path] for group in groups for path in group]
    tied = groups + unmet
    ways = {"predictions": (tied, 1.0), "every layer by itself": (alone + unmet, 1.0)}
    ways |= {f"predictions to the power of {p:g}": (tied, p) for p in POWERS}
    found = {}
    for name, (layers, power) in ways.items():
        items = [_item(group, weighing, costs, power) for group in layers]
        chosen = knapsack.solve(items, limit - weighing.fixed)
        assert chosen is not None
        grids = {
            path: weighing.options[path][option]
            for group, option in zip(layers, chosen, strict=True)
            for path in group
        }
        if grids not in found.values():
            found[name] = grids
    return found | _uniform(weighing, costs, limit)


def _item(group: list[str], weighing: SizeModel, costs: dict, power: float):
    """Sizes and costs of the grids that layers of one width share."""
    specs = weighing.options[group[0]]
    sizes = [[weighing.size(path, spec) for spec in specs] for path in group]
    lost = [costs[path] for path in group]
    return np.array(sizes).sum(axis=0), np.array(lost).sum(axis=0) ** power


def _completed(weighing: SizeModel, costs: dict) -> dict[str, list[float]]:
    """Costs of all free layers.

    One that no slope reaches, for it only chooses who computes or no token came, is
    taken to be as dear as the dearest layer, weight by weight.
    """
    reached = {path: lost for path, lost in costs.items() if any(lost)}
    dearest: dict[QuantSpec, float] = {}
    for path, lost in reached.items():
        for spec, cost in zip(weighing.options[path], lost, strict=True):
            by_weight = cost / weighing.free[path]
            dearest[spec] = max(dearest.get(spec, 0.0), by_weight)
    return {
        path: reached.get(path) or [size * dearest.get(s, 0.0) for s in options]
        for (path, size), options in zip(
            weighing.free.items(), weighing.options.values(), strict=True
        )
    }


def _uniform(weighing: SizeModel, costs: dict, limit: int) -> dict[str, SpecByLayer]:
    """The one grid for all layers that fits and is expected to lose least, if any."""
    options = weighing.options
    fitting = {}
    for spec in max(options.values(), key=len):
        grids = dict.fromkeys(options, spec)
        is_common = all(spec in specs for specs in options.values())
        if is_common and weighing.bytes(grids) <= limit:
            lost = sum(costs[path][options[path].index(spec)] for path in costs)
            fitting[lost] = {f"all on {spec_name(spec)}": grids}
    return fitting[min(fitting)] if fitting else {}


def spec_name(spec: QuantSpec) -> str:
    """A grid in a few letters."""
    return f"{spec.bits} bits g{spec.group_size}"
