"""Several LoRA adapters over one model: the rows of a batch have different ones.

Every adapted layer adds the update of the adapter that a row has (S-LoRA, arXiv
2311.03285; Punica, 2310.18547).
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ...errors import UserError
from ..dtypes import stored_dtype
from ..hooks import put_in_front
from .lora_model import EXPERTS, layer_kind
from .multi_lora_layers import (
    AdapterRows,
    ExpertsByRow,
    MultiLoRAExperts,
    MultiLoRALinear,
)

BASE = 0
"""The number of the model without an adapter."""
KEY = "_multi_lora"
# Classes of mlx-lm and lmx, by name: only the loader imports mlx-lm.
SUPPORTED = ("LoRALinear", "LoRASwitchLinear", "LoRAExperts")
UNSUPPORTED = {
    "DoRALinear": "DoRA",
    "DoRAEmbedding": "DoRA",
    "LoRAEmbedding": "an embedding",
}
EXPERT_GROUPS = ("SwitchGLU", "SwitchMLP")


class MultiLoRA:
    """The adapters of a model, by name.

    Attributes:
        numbers: of every adapter, from 1. A number is never used again.
        hashes: of the weights of every adapter, by number.
        rows: the adapters of the rows in the pass that runs.
    """

    def __init__(self, model: nn.Module):
        self.numbers: dict[str, int] = {}
        self.hashes: dict[int, str] = {}
        self.rows = AdapterRows()
        self._model, self._last = model, BASE
        self._layers: dict[str, MultiLoRALinear | MultiLoRAExperts] = {}

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
        # A and scale * B by the paths of adapted layers.
        weights: dict[str, tuple[mx.array, mx.array]] = {}
        inside = {id(m) for block in adapted.layers for m in block.modules()}
        modules = dict(adapted.named_modules())
        for path, module in modules.items():
            kind = type(module).__name__
            if kind not in SUPPORTED and kind not in UNSUPPORTED:
                continue
            group = type(modules[path.rpartition(".")[0]]).__name__
            what = UNSUPPORTED.get(kind)
            if id(module) not in inside:
                what = what or "a layer outside the blocks"
            elif kind in SUPPORTED[1:] and group not in EXPERT_GROUPS:
                what = f"experts in a {group}"
            if what:
                raise UserError(
                    f"the adapter {name!r} has {what} ({path}), and several adapters "
                    "of a model may have linear layers and usual experts of its blocks",
                    hint="fuse it into the model (mlx_lm.fuse), and use that",
                )
            weights[path] = module.lora_a, module.scale * module.lora_b
        if not weights:
            raise UserError(f"the adapter {name!r} is no low-rank adapter")
        modules = dict(self._model.named_modules())
        for path in weights:
            if path in self._layers:
                continue
            new = {path: MultiLoRALinear(modules[path], self.rows)}
            if layer_kind(modules[path]) == EXPERTS:
                # All layers of the group must read what it makes of their indices.
                parent = path.rpartition(".")[0]
                modules[parent]._adapter_rows = self.rows
                put_in_front(ExpertsByRow, modules[parent])
                new = {
                    f"{parent}.{leaf}": MultiLoRAExperts(layer, self.rows)
                    for leaf, layer in modules[parent].children().items()
                    if layer_kind(layer) == EXPERTS
                }
            self._layers |= new
            self._model.update_modules(tree_unflatten([*new.items()]))
        self._last += 1
        # Not a layer's own: scales may be of 8 bits.
        dtype = stored_dtype(self._model)
        for path, (a, b) in weights.items():
            adapters = self._layers[path].adapters
            adapters.add_adapter(self._last, a.astype(dtype), b.astype(dtype))
        self.numbers[name] = self._last
        digest = hashlib.sha256()
        for path, arrays in sorted(weights.items()):
            digest.update(path.encode())
            for array in arrays:
                digest.update(memoryview(mx.contiguous(array.astype(mx.float32))))
        self.hashes[self._last] = digest.hexdigest()
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
        del self.numbers[name], self.hashes[number]
        for layer in self._layers.values():
            layer.adapters.remove_adapter(number)
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
    rows.begin(numbers)
    try:
        yield
    finally:
        rows.end()
