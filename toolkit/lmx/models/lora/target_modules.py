"""The layers of a model that an adapter could go on, and which of them it should."""

from typing import NamedTuple

import mlx.nn as nn

from ...errors import UserError
from . import base_layer

# The router of a mixture of experts decides who computes; adapting it unbalances them.
ROUTERS = ("gate", "router", "shared_expert_gate")
# These only choose tokens, by their order, through which no gradient comes.
INDEXER = "indexer"
LINEAR, EMBEDDING, EXPERTS = "linear", "embedding", "experts"


class TargetModule(NamedTuple):
    """A layer that can be adapted.

    `key` is its path within its block, or the whole path outside the blocks; `inside`
    says whether it is in one.
    """

    path: str
    key: str
    layer: nn.Module
    kind: str
    inside: bool

    @property
    def in_block(self) -> bool:
        """Whether it is a linear or expert layer of a block."""
        return self.inside and self.kind != EMBEDDING

    def pays(self, rank: int) -> bool:
        """Whether gradients reach it and an adapter is smaller than the layer."""
        *_, outputs, inputs = base_layer.weight_shape(self.layer)
        smaller = rank * (outputs + inputs) < outputs * inputs
        return smaller and INDEXER not in self.key.split(".")


def find_target_modules(model: nn.Module, last: int | None) -> list[TargetModule]:
    """All of them, routers left out, of the `last` blocks (None: of all) and outside.

    Raises:
        UserError: there are not so many blocks.
    """
    blocks = list(model.layers)
    if last and last > len(blocks):
        raise UserError(
            f"last_layers is {last}, but this model has {len(blocks)} blocks"
        )
    keys = {id(m): key for block in blocks for key, m in block.named_modules()}
    meant = {id(m) for block in blocks[-(last or 0) :] for m in block.modules()}
    mixtures = _mixtures(model)
    places = []
    for path, module in model.named_modules():
        kind, inside = _kind(module), id(module) in keys
        key = keys.get(id(module), path)
        if kind is None or _is_router(path, key, module, mixtures):
            continue
        if not inside or id(module) in meant:
            places.append(TargetModule(path, key, module, kind, inside))
    return places


def _kind(module: nn.Module) -> str | None:
    # By name, for only the loader may import mlx-lm.
    if type(module).__name__ in ("SwitchLinear", "QuantizedSwitchLinear"):
        return EXPERTS
    if type(module) is nn.Linear or isinstance(module, nn.QuantizedLinear):
        return LINEAR
    if type(module) is nn.Embedding or isinstance(module, nn.QuantizedEmbedding):
        return EMBEDDING
    return None


def _mixtures(model: nn.Module) -> dict[str, int]:
    """Numbers of experts by path of the module that has the group of them."""
    return {
        path.rsplit(".", 2)[0]: base_layer.weight_shape(module)[0]
        for path, module in model.named_modules()
        if _kind(module) == EXPERTS
    }


def _is_router(path: str, key: str, module: nn.Module, mixtures: dict) -> bool:
    """By its name, or an output for every expert beside their group."""
    if set(key.split(".")) & set(ROUTERS):
        return True
    experts = mixtures.get(path.rpartition(".")[0])
    return experts is not None and base_layer.weight_shape(module)[-2] == experts
