"""A model in codes whose biases take its adapters up, in training as in the export."""

from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from ...models.lora.lora_model import adapted_layers
from ..dequantize import PackedLayer


class QALoRAWeights:
    """What `FakeQuant` is to dense weights: codes and scales stay, biases are sums.

    Args:
        model: carries `GroupLoRALinear` adapters.
        packed: codes, scales and biases of all its quantized layers, as loaded.

    Attributes:
        learned, made: none; see `FakeQuant`.
    """

    learned: ClassVar[dict[str, mx.array]] = {}
    made: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, model: nn.Module, packed: PackedLayer):
        self._layers = adapted_layers(model)
        self._packed = packed

    def rates(self) -> dict[str, float]:
        """No parameter has a learning rate of its own."""
        return {}

    def reach(self, step: int, parameters: dict[str, mx.array]) -> bool:
        """The forward is the same in every step."""
        return False

    def served(
        self, parameters: dict[str, mx.array], compute: mx.Dtype
    ) -> dict[str, mx.array]:
        """Adapters, and biases as they would be stored, by path."""
        found = {name: value.astype(compute) for name, value in parameters.items()}
        for path in self._layers:
            biases = mx.stop_gradient(self._biases(path, parameters))
            found[f"{path}.linear.biases"] = biases.astype(compute)
        return found

    def stored(self, parameters: dict[str, mx.array]) -> dict[str, mx.array]:
        """Codes, scales and biases of every quantized layer, as they are exported."""
        found = {
            f"{path}.{name}": value
            for path, tensors in self._packed.items()
            for name, value in tensors.items()
        }
        return found | {
            f"{path}.biases": self._biases(path, parameters) for path in self._layers
        }

    def _biases(self, path: str, parameters: dict[str, mx.array]) -> mx.array:
        layer = self._layers[path]
        return layer.biases({n: parameters[f"{path}.{n}"] for n in layer.TRAINED})
