"""Attach low-rank adapters to a model, and fuse them into its weights."""

from fnmatch import fnmatchcase
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ...config.lora import LoRAConfig
from ...errors import UserError
from .. import quantized_layers
from ..quantized_layers import TENSORS, dequantize, is_quantized
from .layers import (
    AdapterLayer,
    DoRAEmbedding,
    DoRALinear,
    LoRAEmbedding,
    LoRAExperts,
    LoRALinear,
)

# The router of a mixture of experts; adapting it would unbalance the experts.
ROUTERS = ("gate", "router", "shared_expert_gate")
# It only selects tokens by rank, so no gradient reaches it.
INDEXER = "indexer"
LINEAR, EMBEDDING, EXPERTS = "linear", "embedding", "experts"

# Patterns that are not shell patterns of one path.
AUTO, EVERYTHING = "auto", "*"
LAYER_CLASSES = {
    "lora": {
        LINEAR: LoRALinear,
        EMBEDDING: LoRAEmbedding,
        EXPERTS: LoRAExperts,
    },
    "dora": {LINEAR: DoRALinear, EMBEDDING: DoRAEmbedding},
}


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
    modules = dict(model.named_modules())
    # Number of experts by path of the module that contains their group.
    num_experts = {
        path.rsplit(".", 2)[0]: quantized_layers.weight_shape(module)[0]
        for path, module in modules.items()
        if layer_kind(module) == EXPERTS
    }
    targets = []
    for path, module in modules.items():
        kind, inside = layer_kind(module), id(module) in keys
        key = keys.get(id(module), path)
        if kind is None or {*key.split(".")} & {*ROUTERS}:
            continue
        # Another router has one output per expert beside their group.
        experts = num_experts.get(path.rpartition(".")[0])
        if experts and quantized_layers.weight_shape(module)[-2] == experts:
            continue
        if not inside or id(module) in included:
            targets.append(TargetModule(path, key, module, kind, inside))
    return targets


def layer_kind(module: nn.Module) -> str | None:
    # By name: only the loader imports mlx-lm.
    if type(module).__name__ in ("SwitchLinear", "QuantizedSwitchLinear"):
        return EXPERTS
    if type(module) is nn.Linear or isinstance(module, nn.QuantizedLinear):
        return LINEAR
    if type(module) is nn.Embedding or isinstance(module, nn.QuantizedEmbedding):
        return EMBEDDING
    return None


def attach(
    model: nn.Module, adapter: LoRAConfig, *, seed: int, merged: bool = False
) -> list[str]:
    """Freeze the model and attach adapters to its layers, dense or quantized.

    Args:
        merged: see `LoRALinear`; only linear layers are then adapted.

    Returns:
        The adapted paths within a block, and whole paths of layers outside the blocks.
        If another block has one of them without an adapter, all are whole paths.

    Raises:
        UserError: no layer matches a pattern, or the model has fewer blocks.
    """
    model.freeze()
    classes = {LINEAR: LoRALinear} if merged else LAYER_CLASSES[adapter.type]
    found = find_target_modules(model, adapter.num_layers)
    candidates = [target for target in found if target.kind in classes]
    for pattern, rank in adapter.ranks.items():
        if any(_matches(pattern, target, rank) for target in candidates):
            continue
        names = ", ".join(sorted({target.key for target in candidates}))
        if pattern == AUTO and any(target.in_block for target in candidates):
            raise UserError(
                f"rank {rank} is too large: an adapter would be no smaller than its "
                "layer",
                hint=f"a lower rank, or layers by name: {names}",
            )
        raise UserError(
            f"no layer that {adapter.type} adapts here matches {pattern!r}",
            hint=f"there are: {names}",
        )
    # The first pattern that matches gives the rank.
    targets = []
    for target in candidates:
        ranks = (r for p, r in adapter.ranks.items() if _matches(p, target, r))
        if rank := next(ranks, None):
            targets.append((target, rank))
    paths, keys = ({getattr(t, name) for t, _ in targets} for name in ("path", "key"))
    if any(other.key in keys and other.path not in paths for other in found):
        keys = paths
    key, layers = mx.random.key(seed), []
    for target, rank in sorted(targets, key=lambda pair: pair[0].path):
        key, layer_key = mx.random.split(key)
        layer = classes[target.kind](
            target.layer, rank, adapter.scale(rank), adapter.dropout, layer_key
        )
        if merged:
            layer.merged = True
        layers.append((target.path, layer))
    model.update_modules(tree_unflatten(layers))
    for _, layer in layers:
        layer.unfreeze(keys=list(layer.TRAINABLE), recurse=False)
    return sorted(keys)


def _matches(pattern: str, target: TargetModule, rank: int) -> bool:
    if pattern == AUTO:
        # Gradients must reach the layer, and an adapter must be smaller than it.
        *_, outputs, inputs = quantized_layers.weight_shape(target.layer)
        is_smaller = rank * (outputs + inputs) < outputs * inputs
        return target.in_block and is_smaller and INDEXER not in target.key.split(".")
    if pattern == EVERYTHING:
        return target.in_block
    return fnmatchcase(target.key, pattern)


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The adapted layers of a model by path."""
    return {p: m for p, m in model.named_modules() if isinstance(m, AdapterLayer)}


def lr_multipliers(
    parameters: dict[str, mx.array], adapter: LoRAConfig
) -> dict[str, float]:
    """Learning-rate multipliers other than 1, by parameter."""
    if adapter.loraplus_lr_ratio == 1:
        return {}
    names = (name for name in parameters if name.endswith(".lora_b"))
    return dict.fromkeys(names, adapter.loraplus_lr_ratio)


def fuse(
    model: nn.Module,
    base: dict[str, mx.array],
    parameters: dict[str, mx.array],
    dtype: mx.Dtype,
) -> dict[str, mx.array]:
    """The weights of a trained model without adapters, by mlx-lm's paths, all dense.

    Quantizing the sum of a quantized layer and its adapter to the old grid would lose
    every change below one step, so such a layer becomes dense, and all others too.

    Args:
        base: the weights before training, by path.
        parameters: the trained parameters, adapters included.
        dtype: the type of weights that are codes in `base`; all others keep theirs.
    """
    weights = {k: parameters.get(k, v) for k, v in base.items()}
    dtypes = {k: v.dtype for k, v in base.items()}
    layers = adapted_layers(model)
    wrapped = {id(layer.base_layer): path for path, layer in layers.items()}
    for path, module in model.named_modules():
        if is_quantized(module):
            path = wrapped.get(id(module), path)
            tensors = {n: weights.pop(f"{path}.{n}", None) for n in TENSORS}
            weights[f"{path}.weight"] = dequantize(module, tensors)
            dtypes[f"{path}.weight"] = dtype
    for path, layer in layers.items():
        trained = {name: parameters[f"{path}.{name}"] for name in layer.TRAINABLE}
        name = f"{path}.weight"
        weights[name] = layer.merge(weights[name], trained)
    return {k: v.astype(dtypes[k]) for k, v in weights.items()}
