"""The size of a model for any assignment of grids to its layers, to the byte."""

import math
from dataclasses import dataclass

import mlx.core as mx
from mlx.utils import tree_flatten

from ...config.quant_spec import QuantSpec
from ...config.quantize import MixedPrecisionConfig
from ...errors import UserError
from ..packing import packed_bytes
from ..ptq.base import PTQContext
from ..target_layers import QuantizationPlan, has_known_inputs

# Grids by path.
SpecByLayer = dict[str, QuantSpec]


@dataclass(frozen=True)
class SizeModel:
    """What a model weighs on any grids.

    A free layer is one that the search chooses a grid for.

    Attributes:
        num_weights: weights of the model.
        dense_bytes: bytes of the unquantized model.
        fixed_bytes: bytes of all but the free layers, as they will be written.
        free: number of weights of every free layer, by path.
        options: candidate grids of every free layer, by path.
        dtype: the type of scales.
    """

    num_weights: int
    dense_bytes: int
    fixed_bytes: int
    free: dict[str, int]
    options: dict[str, list[QuantSpec]]
    dtype: mx.Dtype

    @classmethod
    def of(
        cls, task: PTQContext, plan: QuantizationPlan, config: MixedPrecisionConfig
    ) -> "SizeModel":
        """The sizes of a task's model.

        A layer that no candidate fits keeps its grid, as does one whose weight has
        three dimensions and is no expert layer: how it is used is unknown.
        """
        candidates = [
            QuantSpec(bits=bits, group_size=group_size)
            for bits in sorted(set(config.candidate_bits))
            for group_size in sorted(set(config.candidate_group_sizes))
        ]
        candidates += [
            QuantSpec(mode=mode) for mode in sorted(set(config.candidate_modes))
        ]
        parameters = dict(tree_flatten(task.model.parameters()))
        modules = dict(task.model.named_modules())
        options, fixed = {}, 0
        for name, value in parameters.items():
            path = name.removesuffix(".weight")
            is_layer = name != path and path in plan.specs
            width = value.shape[-1] if value.ndim else 0
            fitting = [spec for spec in candidates if spec.fits(width)]
            is_free = is_layer and path not in plan.explicit
            is_free = is_free and has_known_inputs(modules[path])
            if is_free and fitting:
                options[path] = fitting
            elif is_layer:
                fixed += packed_bytes(
                    value.size, plan.specs[path], task.dtype, num_experts=len(value)
                )
            else:
                fixed += value.nbytes
        return cls(
            num_weights=sum(value.size for value in parameters.values()),
            dense_bytes=sum(value.nbytes for value in parameters.values()),
            fixed_bytes=fixed,
            free={path: parameters[f"{path}.weight"].size for path in options},
            options=options,
            dtype=task.dtype,
        )

    def layer_bytes(self, path: str, spec: QuantSpec) -> int:
        """Bytes of one layer on a grid."""
        return packed_bytes(self.free[path], spec, self.dtype)

    def total_bytes(self, specs: SpecByLayer) -> int:
        """Bytes of the whole model with these grids of the free layers."""
        layers = (self.layer_bytes(path, spec) for path, spec in specs.items())
        return self.fixed_bytes + sum(layers)

    def bits_per_weight(self, size: int) -> float:
        """Bits per weight of a model of so many bytes."""
        return 8 * size / self.num_weights

    def max_bytes(self, config: MixedPrecisionConfig) -> int:
        """The budget in bytes.

        Raises:
            UserError: no assignment fits into the budget, or the dense model does.
        """
        limit = config.max_bytes(self.num_weights)
        if limit >= self.dense_bytes:
            bits = self.bits_per_weight(self.dense_bytes)
            raise UserError(
                f"the budget of {limit:,} bytes holds the unquantized model, which has "
                f"{self.dense_bytes:,} ({bits:.4g} bits per weight)",
                hint="give a smaller budget, or leave this stage out",
            )
        smallest = self.fixed_bytes + sum(
            min(self.layer_bytes(path, spec) for spec in specs)
            for path, specs in self.options.items()
        )
        if limit < smallest:
            bits = math.ceil(1000 * self.bits_per_weight(smallest)) / 1000
            raise UserError(
                f"no choice of grids fits into {limit:,} bytes "
                f"({self.bits_per_weight(limit):.4g} bits per weight)",
                hint=f"the smallest possible is {smallest:,} bytes, or {bits:g} bits "
                "per weight",
            )
        return limit
