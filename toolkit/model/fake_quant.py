"""Quantization-aware weights: what the forward uses is what the export will store.

Every forward rounds with the very operations, types and adapter merge of the export, so
expanding the exported codes gives the weights of the last forward bit for bit.
"""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..quant.spec import QuantSpec, expand, pack
from .lora import adapted


class FakeQuant:
    """The rounded weights of a model in training.

    Layers that are not trained are rounded at once, in the model, and stay so.

    Args:
        model: as loaded, in the types its checkpoint stores; its layers may carry LoRA
            adapters.
        specs: the grid of every rounded layer, by path.
        dtype: the type the export stores scales in.
    """

    def __init__(self, model: nn.Module, specs: dict[str, QuantSpec], dtype: mx.Dtype):
        self.dtype = dtype
        self._adapted = adapted(model)
        # A layer that is kept from rounding adds its adapter itself.
        for path, layer in self._adapted.items():
            layer.merged = path in specs
        self._types = {k: v.dtype for k, v in tree_flatten(model.parameters())}
        modules = dict(model.named_modules())
        frozen = {
            path
            for path in specs.keys() - self._adapted.keys()
            if "weight" not in modules[path].trainable_parameters()
        }
        self._trained = {p: spec for p, spec in specs.items() if p not in frozen}
        self._frozen = {}
        for path in sorted(frozen):
            packed = pack(modules[path].weight, specs[path], dtype)
            modules[path].weight = expand(packed, specs[path], dtype)
            self._frozen |= _named(path, packed)
        mx.eval(self._frozen, model.parameters())

    def served(
        self, parameters: dict[str, mx.array], compute: mx.Dtype
    ) -> dict[str, mx.array]:
        """Trained weights as served, by path, straight-through to the masters.

        Every one passes through the type it has in the model. An adapter's gradient
        does not come through here: `LoRALinear` takes it from the product, at the cost
        of plain LoRA.
        """
        weights = {}
        for name, value in parameters.items():
            store = _straight_through(partial(mx.array.astype, dtype=self._types[name]))
            weights[name] = store(value).astype(compute)
        for path, spec in self._trained.items():
            inner = ".linear" if path in self._adapted else ""
            name = f"{path}{inner}.weight"
            rounded = self._rounding(spec)(self._merged(path, parameters))
            weights[name] = rounded.astype(compute)
        return weights

    def stored(self, parameters: dict[str, mx.array]) -> dict[str, mx.array]:
        """Codes, scales and biases of every rounded layer, as they are exported."""
        tensors = dict(self._frozen)
        for path, spec in self._trained.items():
            packed = pack(self._merged(path, parameters), spec, self.dtype)
            tensors |= _named(path, packed)
        return tensors

    def _merged(self, path: str, parameters: dict[str, mx.array]) -> mx.array:
        if path not in self._adapted:
            return parameters[f"{path}.weight"]
        layer = self._adapted[path]
        names = {name: f"{path}.{name}" for name in layer.TRAINED}
        trained = {k: mx.stop_gradient(parameters[v]) for k, v in names.items()}
        return layer.merge(layer.loaded, trained)

    def _rounding(self, spec: QuantSpec):
        return _straight_through(
            lambda weight: expand(pack(weight, spec, self.dtype), spec, self.dtype)
        )


def _named(path: str, packed: dict[str, mx.array]) -> dict[str, mx.array]:
    return {f"{path}.{name}": value for name, value in packed.items()}


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
