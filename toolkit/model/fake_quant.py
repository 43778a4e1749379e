"""Quantization-aware weights: what the forward uses is what the export will store.

Every forward rounds with the very operations, types and adapter merge of the export, so
expanding the exported codes gives the weights of the last forward bit for bit.
"""

import mlx.core as mx
import mlx.nn as nn

from ..quant.spec import QuantSpec, expand, pack
from .lora import adapted


class FakeQuant:
    """The rounded weights of a model in training.

    Args:
        model: its layers may carry LoRA adapters.
        specs: the grid of every rounded layer, by path.
        dtype: the type the export stores scales in.
    """

    def __init__(self, model: nn.Module, specs: dict[str, QuantSpec], dtype: mx.Dtype):
        self.specs = specs
        self.dtype = dtype
        self._adapted = adapted(model)
        modules = dict(model.named_modules())
        self._frozen = {
            path: modules[path].weight
            for path in specs.keys() - self._adapted.keys()
            if "weight" not in modules[path].trainable_parameters()
        }

    def served(
        self, parameters: dict[str, mx.array], compute: mx.Dtype
    ) -> dict[str, mx.array]:
        """Rounded weights by parameter path, straight-through to the trained ones.

        Every trained parameter passes through the stored type. An adapter's gradient
        does not come through here: `LoRALinear` takes it from the product, at the cost
        of plain LoRA.
        """
        store = _straight_through(lambda weight: weight.astype(self.dtype))
        weights = {k: store(v).astype(compute) for k, v in parameters.items()}
        for path, spec in self.specs.items():
            name = f"{path}.linear.weight" if path in self._adapted else f"{path}.weight"
            rounded = self._rounding(spec)(self._merged(path, parameters))
            weights[name] = rounded.astype(compute)
        return weights

    def stored(self, parameters: dict[str, mx.array]) -> dict[str, mx.array]:
        """Codes, scales and biases of every rounded layer, as the export writes them."""
        tensors = {}
        for path, spec in self.specs.items():
            packed = pack(self._merged(path, parameters), spec, self.dtype)
            tensors |= {f"{path}.{name}": value for name, value in packed.items()}
        return tensors

    def _merged(self, path: str, parameters: dict[str, mx.array]) -> mx.array:
        if path in self._adapted:
            pair = (parameters[f"{path}.lora_a"], parameters[f"{path}.lora_b"])
            return self._adapted[path].merge(*map(mx.stop_gradient, pair))
        if path in self._frozen:
            return self._frozen[path]
        return parameters[f"{path}.weight"]

    def _rounding(self, spec: QuantSpec):
        return _straight_through(
            lambda weight: expand(pack(weight, spec, self.dtype), spec, self.dtype)
        )


def _straight_through(function):
    """`function` with the identity as its gradient (arXiv 1308.3432).

    A custom gradient, because w + stop_gradient(f(w) - w) is not f(w) in 16 bits.
    """

    @mx.custom_function
    def forward(weight: mx.array) -> mx.array:
        return function(weight).astype(weight.dtype)

    @forward.vjp
    def _(_, cotangent, __):
        return cotangent

    return forward
