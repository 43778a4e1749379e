"""Weights of quantization-aware training: the forward pass uses what the export stores.

Every forward pass quantizes with the operations, types and adapter merge of the export.
The exported codes therefore dequantize, bit for bit, to the weights of the last forward
pass.
"""

import mlx.core as mx
import mlx.nn as nn

from ...config.qat import QATConfig
from ...config.quant_spec import FLOAT_MODES, QuantSpec
from ...interfaces import WeightTransform
from ...models.dtypes import forward_weight
from ...models.float_formats import MODES
from ...models.lora.layers import AdapterLayer
from ...models.lora.lora_model import adapted_layers
from ...models.quantized_layers import fake_quantize_inputs
from ..bit_packing import unpack_codes
from ..packing import PackedLayers, dequantize
from .quantizers import FixedCodesQuantizer, make_quantizer

# Learning rate of scales and biases, relative to that of weights.
SCALE_LR_MULTIPLIER = 0.1
# Names of quantization parameters of all quantizers.
QPARAMS = ("scales", "biases", "spreads", "shifts")


class FakeQuant(WeightTransform):
    """The fake-quantized weights of a model in training.

    Layers that are not trained are quantized once, in the model.

    Args:
        model: its layers may carry LoRA adapters.
        specs: the grid of every quantized layer, by path.
        dtype: the type in which the export stores scales.
        packed: initial codes, scales and biases, by path and name; the model's weights
            are then their float32 values.

    Attributes:
        codes: that stay while their scales are trained, uint8 [..., K], by the path of
            the weight.
        qparams: initial scales and biases to train, float32 vectors, by path and name.
    """

    def __init__(
        self,
        model: nn.Module,
        specs: dict[str, QuantSpec],
        dtype: mx.Dtype,
        config: QATConfig | None = None,
        packed: PackedLayers | None = None,
    ):
        self.dtype = dtype
        self.config = config or QATConfig()
        self._adapted = adapted_layers(model)
        self._specs = specs
        self._quantizers = {
            path: make_quantizer(self.config, spec, dtype)
            for path, spec in specs.items()
        }
        self._has_begun = not self.config.fake_quant_after_n_steps
        modules = dict(model.named_modules())
        self._trained = [
            path
            for path in specs
            if path in self._adapted or "weight" in modules[path].trainable_parameters()
        ]
        self.codes, self.qparams, self._frozen = {}, {}, {}
        for path, quantizer in self._quantizers.items():
            layer, codes = modules[path], packed and packed[path]
            if path in self._trained:
                weight = layer.base_weight if path in self._adapted else layer.weight
                if codes:
                    start = quantizer.init_from_codes(codes)
                else:
                    start = quantizer.init(weight)
                self.qparams |= _with_path(path, start)
                if isinstance(quantizer, FixedCodesQuantizer):
                    fixed = unpack_codes(codes["weight"], specs[path].bits)
                    self.codes[f"{path}.weight"] = fixed.astype(mx.uint8)
                mx.eval(self.qparams, self.codes)
            else:
                codes = codes or quantizer.pack(
                    layer.weight, quantizer.init(layer.weight)
                )
                layer.weight = dequantize(codes, specs[path], dtype)
                self._frozen |= _with_path(path, codes)
                mx.eval(self._frozen, layer.weight)
        self.derived_weights = self._unfreeze_derived(modules) | self.codes.keys()
        self._quantized_inputs = []
        if self.config.quantize_activations:
            self._quantized_inputs = [p for p in specs if _is_linear(modules[p])]
        self._layers = modules
        self._fake_quantize_inputs()

    def lr_multipliers(self) -> dict[str, float]:
        """Learning-rate multipliers other than 1, by parameter."""
        multipliers = dict.fromkeys(self.qparams, SCALE_LR_MULTIPLIER)
        for name in self.codes:
            path = name.removesuffix(".weight")
            multipliers |= _with_path(path, self._quantizers[path].lr_multipliers())
        return multipliers

    def on_step(self, step: int, parameters: dict[str, mx.array]) -> bool:
        """Begin fake quantization where a step, counted from 0, is the first with it.

        Args:
            parameters: get initial scales and biases of the current weights then.

        Returns:
            Whether the forward pass changes.
        """
        start = self.config.fake_quant_after_n_steps
        if self._has_begun or step < start:
            return False
        self._has_begun = True
        self._fake_quantize_inputs()
        if step == start:
            for path in self._trained:
                weight = self._merged(path, parameters)
                qparams = self._quantizers[path].init(weight)
                parameters |= _with_path(path, qparams)
        return True

    def forward_weights(
        self, parameters: dict[str, mx.array], compute: mx.Dtype
    ) -> dict[str, mx.array]:
        """Quantized and merged weights of the forward pass, by path.

        Where a quantizer is straight-through, and where none is, an adapter gets no
        gradient from here: `LoRALinear` takes it from the product, at the cost of plain
        LoRA.
        """
        weights = {}
        for path in self._trained:
            weight = self._merged(path, parameters)
            if self._has_begun:
                qparams = self._qparams(path, parameters)
                weight = self._quantizers[path].fake_quantize(weight, qparams)
            inner = ".linear" if path in self._adapted else ""
            weights[f"{path}{inner}.weight"] = weight.astype(compute)
        for path in self._adapted.keys() - self._specs.keys():
            weight, stored = self._merged(path, parameters), self._adapted[path]
            weights[f"{path}.linear.weight"] = forward_weight(
                weight, stored.base_weight.dtype, compute
            )
        return weights

    def export_tensors(self, parameters: dict[str, mx.array]) -> dict[str, mx.array]:
        """Codes, scales and biases of every quantized layer, for a checkpoint."""
        tensors = dict(self._frozen)
        for path in self._trained:
            weight = self._merged(path, parameters)
            qparams = self._qparams(path, parameters)
            tensors |= _with_path(path, self._quantizers[path].pack(weight, qparams))
        return tensors

    def count_changed_codes(
        self, packed: PackedLayers, tensors: dict[str, mx.array]
    ) -> tuple[int, int]:
        """How many codes of the trained layers have changed, and how many there are.

        Args:
            packed: the codes before training, by path and name.
            tensors: those of `export_tensors`.
        """
        changed = total = 0
        for path in self._trained:
            spec = self._specs[path]
            before, after = (
                unpack_codes(codes, spec.bits)
                for codes in (packed[path]["weight"], tensors[f"{path}.weight"])
            )
            if spec.mode in FLOAT_MODES:
                # Zero has two codes.
                before, after = map(MODES[spec.mode].elements.values, (before, after))
            changed += (before != after).sum().item()
            total += before.size
        return changed, total

    def _fake_quantize_inputs(self) -> None:
        """Let linear layers quantize their inputs, once fake quantization has begun."""
        for path in self._quantized_inputs:
            mode = self._specs[path].mode if self._has_begun else None
            fake_quantize_inputs(self._layers[path], mode)

    def _unfreeze_derived(self, modules: dict[str, nn.Module]) -> set[str]:
        """Unfreeze derived weights whose quantizers need their gradients."""
        derived = set()
        for layer in self._adapted.values():
            layer.merged = True
        for path in self._trained:
            if self._quantizers[path].IS_STRAIGHT_THROUGH:
                continue
            layer, inner = modules[path], ""
            if path in self._adapted:
                layer.grad_through_merge, layer, inner = True, layer.linear, ".linear"
            if "weight" not in layer.trainable_parameters():
                layer.unfreeze(keys=["weight"], recurse=False)
                derived.add(f"{path}{inner}.weight")
        return derived

    def _qparams(
        self, path: str, parameters: dict[str, mx.array]
    ) -> dict[str, mx.array]:
        paths = {name: f"{path}.{name}" for name in QPARAMS}
        return {k: parameters[v] for k, v in paths.items() if v in self.qparams}

    def _merged(self, path: str, parameters: dict[str, mx.array]) -> mx.array:
        """The weight before quantization, or its codes if they are fixed."""
        if path not in self._adapted:
            name = f"{path}.weight"
            return self.codes[name] if name in self.codes else parameters[name]
        layer = self._adapted[path]
        trained = {name: parameters[f"{path}.{name}"] for name in layer.TRAINABLE}
        if not layer.grad_through_merge:
            trained = {k: mx.stop_gradient(v) for k, v in trained.items()}
        return layer.merge(layer.base_weight, trained)


def _is_linear(layer: nn.Module) -> bool:
    """Whether the layer, or what it adapts, is one whose inputs mlx-lm can quantize."""
    if isinstance(layer, AdapterLayer):
        layer = layer.base_layer
    return isinstance(layer, nn.Linear)


def _with_path(path: str, tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    return {f"{path}.{name}": value for name, value in tensors.items()}
