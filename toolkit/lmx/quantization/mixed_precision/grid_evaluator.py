"""What choices of grids do to a model's predictions, tried with quick rounding."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ...config.quant_spec import QuantSpec
from ..packing import expand, pack
from .sensitivity import LayerStatistics


class GridEvaluator:
    """Compares a model with itself on other grids, on the same windows.

    Args:
        model: in the type it computes in; `close` leaves it as it was.
        columns: costs of an error by column, by path of the layers that are fitted;
            others are rounded to the nearest.
        tokens: int32 [n, L].
        folder: where the model's own predictions are kept.
        dtype: the type the checkpoint stores.
    """

    def __init__(
        self,
        model: nn.Module,
        columns: dict[str, mx.array],
        tokens: mx.array,
        folder: Path,
        dtype: mx.Dtype,
    ):
        self.model, self.columns, self.tokens = model, columns, tokens
        self.folder, self.dtype = folder, dtype
        self._modules = dict(model.named_modules())
        self._dense: dict[str, mx.array] = {}
        self._specs: dict[str, QuantSpec] = {}
        for number, window in enumerate(tokens):
            mx.save_safetensors(self._file(number), {"logits": model(window[None])})

    def __call__(self, specs: dict[str, QuantSpec]) -> float:
        """KL(model || model on these grids), nats per token."""
        for path, spec in specs.items():
            if self._specs.get(path) != spec:
                self._round(path, spec)
        total = 0.0
        for number, window in enumerate(self.tokens):
            full = _log_softmax(mx.load(self._file(number))["logits"])
            off = full - _log_softmax(self.model(window[None]))
            total += (mx.exp(full) * off).sum().item()
        return total / self.tokens.size

    def close(self) -> None:
        """Put the model's own weights back."""
        for path, weight in self._dense.items():
            self._modules[path].weight = weight
        self._specs.clear()

    def _round(self, path: str, spec: QuantSpec) -> None:
        module = self._modules[path]
        dense = self._dense.setdefault(path, module.weight)
        stored = dense.astype(self.dtype)
        if path in self.columns:
            rounded = LayerStatistics(stored, self.columns[path]).rounded(spec)
        else:
            rounded = expand(pack(stored, spec, self.dtype), spec, self.dtype)
        module.weight = rounded.astype(dense.dtype)
        mx.eval(module.weight)
        self._specs[path] = spec

    def _file(self, number: int) -> str:
        return str(self.folder / f"logits-{number:04d}.safetensors")


def _log_softmax(logits: mx.array) -> mx.array:
    return nn.log_softmax(logits.astype(mx.float32))
