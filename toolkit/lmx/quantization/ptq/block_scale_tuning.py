"""Scale tuning in mode nvfp4: train the E4M3 scales of blocks, with fixed elements.

The logarithm of a scale is trained, so that one learning rate has the same meaning for
all blocks. Every forward pass uses the nearest E4M3 scales, and the gradient passes
straight through this rounding. MLX's products have no gradient for these scales: a
dense model has the weights in training.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ...models import global_scale, quantized_layers
from ...models.float_formats import MODES, E4M3Scales
from ...models.qq_linear import QQLinear, fake_quantize_inputs
from ..bit_packing import unpack_codes
from .candidates import TeacherDivergence
from .scale_tuning import FlatParameters, ScaleTuner

MODE = "nvfp4"
# E4M3 scales are 6 to 12 % apart. A probe would end before any of them has moved.
LEARNING_RATE = 3e-3


class BlockScaleTuner(ScaleTuner):
    """Trains the block scales of nvfp4 layers; layers of other modes stay.

    Args:
        dense: the unquantized model in its compute dtype. It gets the weights of the
            quantized model.
    """

    def __init__(self, *args: Any, dense: nn.Module, **settings: Any):
        self._dense = dense
        super().__init__(*args, **settings)

    def _init_masters(self) -> dict[str, mx.array]:
        modules = dict(self.model.model.named_modules())
        layers = {
            path: layer
            for path, layer in modules.items()
            if quantized_layers.is_quantized(layer) and layer.mode == MODE
        }
        self._codes = {path: layer.weight for path, layer in layers.items()}
        self._units = {
            path: global_scale.scale_unit(layer.global_scale)
            for path, layer in layers.items()
            if global_scale.NAME in layer
        }
        shapes = {path: layer.scales.shape for path, layer in layers.items()}
        self._flat = FlatParameters(["scales"], shapes)
        codes = {f"{path}.scales": layer.scales for path, layer in layers.items()}
        scales = E4M3Scales.values(self._flat.flatten(codes)["scales"])
        # A scale of zero has no logarithm. It stays. That of an expert of zeros is
        # negative, and becomes zero.
        self._is_zero = scales <= 0
        self._update_dense(modules)
        return {"scales": mx.log(mx.where(self._is_zero, 1.0, scales))}

    def _update_dense(self, modules: dict[str, nn.Module]) -> None:
        """Give the dense model the weights that stay, and inputs that are rounded."""
        layers = dict(self._dense.named_modules())
        weights = {}
        for path, module in modules.items():
            if quantized_layers.is_quantized(module):
                if path not in self._codes:
                    weight = quantized_layers.dequantized_weight(module)
                    weights[f"{path}.weight"] = weight.astype(layers[path].weight.dtype)
                if isinstance(module, QQLinear):
                    fake_quantize_inputs(layers[path], module.mode)
        names = {name for name, _ in tree_flatten(self._dense.parameters())}
        names -= {f"{path}.weight" for path in modules if "scales" in modules[path]}
        stored = dict(tree_flatten(self.model.model.parameters()))
        weights |= {name: stored[name] for name in names}
        self._dense.update(tree_unflatten(list(weights.items())))
        self._types = {path: layers[path].weight.dtype for path in self._codes}
        mx.eval(self._dense.parameters())

    def _make_divergence(self) -> TeacherDivergence:
        return TeacherDivergence(
            self._dense, [f"{path}.weight" for path in self._codes]
        )

    def _value_and_grad(self, loss: Callable) -> tuple[mx.array, dict]:
        def loss_of_masters(masters):
            scales = self._flat.unflatten({"scales": self._rounded(masters["scales"])})
            weights = {
                f"{path}.weight": self._weight(path, scales[f"{path}.scales"])
                for path in self._codes
            }
            self._dense.update(tree_unflatten(list(weights.items())))
            return loss()

        return mx.value_and_grad(loss_of_masters)(dict(self._masters))

    def _weight(self, path: str, scales: mx.array) -> mx.array:
        """The weight [..., K] of a layer. Without a global scale, the dtype of the
        model holds it exactly."""
        number = MODES[MODE].elements
        if path in self._units:
            scales = scales * self._units[path]
        elements = number.values(unpack_codes(self._codes[path], number.bits))
        groups = elements.reshape(*scales.shape, -1) * scales[..., None]
        return groups.reshape(elements.shape).astype(self._types[path])

    def _rounded(self, logarithms: mx.array) -> mx.array:
        """The nearest E4M3 scales, with the gradient of the exponential."""

        @mx.custom_function
        def forward(logarithms):
            return E4M3Scales.values(self._scale_codes(logarithms))

        @forward.vjp
        def _(_, cotangent, scales):
            return cotangent * scales

        return forward(logarithms)

    def _scale_codes(self, logarithms: mx.array) -> mx.array:
        codes = E4M3Scales.codes(mx.exp(logarithms))
        codes = mx.clip(codes, E4M3Scales.MIN_CODE, E4M3Scales.MAX_CODE)
        return mx.where(self._is_zero, 0, codes)

    def _gradients(self, count: mx.array) -> dict[str, mx.array]:
        return {"scales": self._sums["scales"] / count}

    def _move(self, moves: dict[str, mx.array]) -> None:
        self._masters["scales"] += moves["scales"]

    def _stored(self) -> dict[str, mx.array]:
        codes = self._scale_codes(self._masters["scales"])
        named = self._flat.unflatten({"scales": codes})
        return {name: value.astype(mx.uint8) for name, value in named.items()}

    def _probe_learning_rate(self) -> float:
        return LEARNING_RATE
