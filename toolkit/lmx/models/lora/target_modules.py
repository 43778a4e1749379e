"""The layers of a model that an adapter can be attached to."""

from typing import NamedTuple

import mlx.nn as nn

from ...errors import UserError
from .. import quantized_layers

# The router of a mixture of experts; adapting it would unbalance the experts.
ROUTERS = ("gate", "router", "shared_expert_gate")
# It only selects tokens by rank, so no gradient reaches it.
INDEXER = "indexer"
LINEAR, EMBEDDING, EXPERTS = "linear", "embedding", "experts"


class TargetModule(NamedTuple):
    """A layer that can be adapted.

    Attributes:
        key: its path within its block, or the whole path outside the blocks.
        inside: whether it is in a block.
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

    def is_worthwhile(self, rank: int) -> bool:
        """Whether gradients reach the layer and an adapter is smaller than it."""
        *_, outputs, inputs = quantized_layers.weight_shape(self.layer)
        is_smaller = rank * (outputs + inputs) < outputs * inputs
        return is_smaller and INDEXER not in self.key.split(".")


def find_target_modules(
    model: nn.Module, num_layers: int | None = None
) -> list[TargetModule]:
    """Layers of the last `num_layers` blocks (None: of all) and outside the blocks.

    Routers are left out.

    Raises:
        UserError: the model has fewer blocks.
    """
    blocks = list(model.layers)
    if num_layers and num_layers > len(blocks):
        raise UserError(
            f"num_layers is {num_layers}, but this model has {len(blocks)} blocks"
        )
    keys = {id(m): key for block in blocks for key, m in block.named_modules()}
    last_blocks = blocks[-(num_layers or 0) :]
    included = {id(m) for block in last_blocks for m in block.modules()}
    num_experts = _num_experts(model)
    targets = []
    for path, module in model.named_modules():
        kind, inside = _kind(module), id(module) in keys
        key = keys.get(id(module), path)
        if kind is None or _is_router(path, key, module, num_experts):
            continue
        if not inside or id(module) in included:
            targets.append(TargetModule(path, key, module, kind, inside))
    return targets


def _kind(module: nn.Module) -> str | None:
    # By name: only the loader imports mlx-lm.
    if type(module).__name__ in ("SwitchLinear", "QuantizedSwitchLinear"):
        return EXPERTS
    if type(module) is nn.Linear or isinstance(module, nn.QuantizedLinear):
        return LINEAR
    if type(module) is nn.Embedding or isinstance(module, nn.QuantizedEmbedding):
        return EMBEDDING
    return None


def _num_experts(model: nn.Module) -> dict[str, int]:
    """Number of experts by path of the module that contains their group."""
    return {
        path.rsplit(".", 2)[0]: quantized_layers.weight_shape(module)[0]
        for path, module in model.named_modules()
        if _kind(module) == EXPERTS
    }


def _is_router(path: str, key: str, module: nn.Module, num_experts: dict) -> bool:
    """By its name, or by one output per expert beside their group."""
    if set(key.split(".")) & set(ROUTERS):
        return True
    experts = num_experts.get(path.rpartition(".")[0])
    return experts is not None and quantized_layers.weight_shape(module)[-2] == experts
