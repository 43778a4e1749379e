"""Several LoRA adapters over one model: the rows of a batch have different ones.

Every adapted layer adds the update of the adapter that a row has (S-LoRA, arXiv
2311.03285; Punica, 2310.18547). Rows with different adapters share two products: the
matrices A of all adapters side by side, and their B one below the other. What a row
gets from adapters of others is masked between them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ...errors import UserError
from ..quantized_layers import is_quantized

BASE = 0
"""The number of the model without an adapter."""
KEY = "_multi_lora"
SUPPORTED = "LoRALinear"
# Wrappers of mlx-lm and lmx, by name: only the loader imports mlx-lm.
UNSUPPORTED = {
    "DoRALinear": "DoRA",
    "DoRAEmbedding": "DoRA",
    "LoRAEmbedding": "an embedding",
    "LoRASwitchLinear": "experts",
    "LoRAExperts": "experts",
}


@dataclass
class AdapterRows:
    """The adapters of the rows in the pass that runs; shared by all layers.

    Attributes:
        numbers: of every row; empty = all rows have the model's own weights.
        last: those of the last pass with adapters.
    """

    numbers: tuple[int, ...] = ()
    last: tuple[int, ...] = ()


@dataclass(frozen=True)
class JoinedAdapters:
    """The adapters of some rows in one layer.

    Attributes:
        rows: the numbers for which they are joined.
        a: [in, R], of all adapters side by side.
        b: [R, out].
        mask: which of the R columns a row has [B, R]; None = all rows have all.
    """

    rows: tuple[int, ...]
    a: mx.array
    b: mx.array
    mask: mx.array | None


@dataclass
class LayerAdapters:
    """The adapters of a layer by number: A [in, rank] and scale * B [rank, out]."""

    weights: dict[int, tuple[mx.array, mx.array]] = field(default_factory=dict)
    joined: JoinedAdapters | None = None

    def of(self, rows: tuple[int, ...]) -> JoinedAdapters | None:
        """Those of rows; None if no row has one. Kept for the next pass."""
        if self.joined is None or self.joined.rows is not rows:
            numbers = sorted({*rows} & self.weights.keys())
            if not numbers:
                return None
            self.joined = self._join(rows, numbers)
        return self.joined

    def _join(self, rows: tuple[int, ...], numbers: Sequence[int]) -> JoinedAdapters:
        pairs = [self.weights[number] for number in numbers]
        if len({*rows}) == 1:
            return JoinedAdapters(rows, *pairs[0], None)
        a = mx.concatenate([a for a, _ in pairs], axis=1)
        b = mx.concatenate([b for _, b in pairs])
        sizes = zip(numbers, pairs, strict=True)
        owners = [number for number, (_, b) in sizes for _ in range(len(b))]
        mask = mx.array(rows)[:, None] == mx.array(owners)
        return JoinedAdapters(rows, a, b, mask)


class MultiLoRALinear(nn.Module):
    """A frozen linear layer plus, for each row, (x A) B of the row's adapter."""

    def __init__(self, linear: nn.Module, rows: AdapterRows):
        super().__init__()
        self.linear = linear
        # No parameters of the model.
        self._rows, self._adapters = rows, LayerAdapters()

    @property
    def adapters(self) -> LayerAdapters:
        """Its adapters."""
        return self._adapters

    def __call__(self, x: mx.array) -> mx.array:
        y, rows = self.linear(x), self._rows.numbers
        joined = self._adapters.of(rows) if rows else None
        if joined is None:
            return y
        update = x @ joined.a
        if joined.mask is not None:
            mask = joined.mask
            if x.ndim == 2:
                # The tokens of all rows, one row after the other.
                mask = mx.repeat(mask, len(x) // len(rows), axis=0)
            mask = mask.reshape(len(mask), *[1] * (x.ndim - 2), mask.shape[1])
            # Not a product: what is masked may be infinite.
            update = mx.where(mask, update, mx.zeros((), update.dtype))
        return y + (update @ joined.b).astype(y.dtype)


class MultiLoRA:
    """The adapters of a model, by name.

    Attributes:
        numbers: of every adapter, from 1. A number is never used again.
        rows: the adapters of the rows in the pass that runs.
    """

    def __init__(self, model: nn.Module):
        self.numbers: dict[str, int] = {}
        self.rows = AdapterRows()
        self._model, self._last = model, BASE
        self._layers: dict[str, MultiLoRALinear] = {}

    def add(self, name: str, adapted: nn.Module) -> int:
        """Add an adapter; returns its number.

        Args:
            adapted: another instance of the model, with the adapter attached. Only its
                adapter is used.

        Raises:
            UserError: the name is in use, or a layer cannot have several adapters.
        """
        if name in self.numbers:
            raise UserError(f"there is an adapter {name!r} already")
        weights = dict(_adapter_weights(adapted, name))
        modules = dict(self._model.named_modules())
        for path in weights:
            if path not in self._layers:
                layer = MultiLoRALinear(modules[path], self.rows)
                self._layers[path] = layer
                self._model.update_modules(tree_unflatten([(path, layer)]))
        self._last += 1
        for path, (a, b) in weights.items():
            layer = self._layers[path]
            dtype = _dtype(layer.linear)
            pair = a.astype(dtype), b.astype(dtype)
            mx.eval(pair)
            layer.adapters.weights[self._last] = pair
        self.numbers[name] = self._last
        return self._last

    def number(self, name: str | None) -> int:
        """The number of an adapter; None = the model itself.

        Raises:
            UserError: there is none of this name.
        """
        if name is None:
            return BASE
        if name not in self.numbers:
            raise UserError(f"there is no adapter {name!r}")
        return self.numbers[name]

    def remove(self, name: str) -> int:
        """Free an adapter; returns its number.

        Raises:
            UserError: there is none of this name.
        """
        number = self.number(name)
        del self.numbers[name]
        for layer in self._layers.values():
            layer.adapters.weights.pop(number, None)
            layer.adapters.joined = None
        return number


def multi_lora(model: Any) -> MultiLoRA:
    """The adapters of a model, which keeps them."""
    if KEY not in model.__dict__:
        object.__setattr__(model, KEY, MultiLoRA(model))
    return model.__dict__[KEY]


@contextmanager
def adapter_rows(model: Any, numbers: Sequence[int]) -> Iterator[None]:
    """Let the rows of the passes in this context have these adapters.

    Args:
        numbers: of every row, in the order of the batch; see `MultiLoRA`.
    """
    if not any(numbers):
        yield
        return
    rows = multi_lora(model).rows
    # Layers compare by identity whether the rows are those of the pass before.
    if rows.last != tuple(numbers):
        rows.last = tuple(numbers)
    rows.numbers = rows.last
    try:
        yield
    finally:
        rows.numbers = ()


def _adapter_weights(
    adapted: nn.Module, name: str
) -> Iterator[tuple[str, tuple[mx.array, mx.array]]]:
    """A and scale * B by the paths of adapted layers."""
    found = False
    inside = {id(m) for block in adapted.layers for m in block.modules()}
    for path, module in adapted.named_modules():
        kind = type(module).__name__
        if kind in UNSUPPORTED or (kind == SUPPORTED and id(module) not in inside):
            what = UNSUPPORTED.get(kind, "a layer outside the blocks")
            raise UserError(
                f"the adapter {name!r} has {what} ({path}), and several adapters of a "
                "model may have linear layers of its blocks",
                hint="fuse it into the model (mlx_lm.fuse), and use that",
            )
        if kind == SUPPORTED:
            found = True
            yield path, (module.lora_a, module.scale * module.lora_b)
    if not found:
        raise UserError(f"the adapter {name!r} is no low-rank adapter")


def _dtype(linear: nn.Module) -> mx.Dtype:
    """The type in which a layer computes."""
    return linear.scales.dtype if is_quantized(linear) else linear.weight.dtype
