"""Low-rank adapters of a model: where they go, and the weights they leave."""

from fnmatch import fnmatchcase

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ...config.lora import LoRAConfig
from ...errors import UserError
from . import base_layer
from .layers import DoRAEmbedding, DoRALinear, LoRAEmbedding, LoRAExperts, LoRALinear
from .qa_lora import QALoRALinear
from .target_modules import (
    EMBEDDING,
    EXPERTS,
    LINEAR,
    TargetModule,
    find_target_modules,
)

# Patterns that mean more than they spell.
AUTO, EVERYTHING = "auto", "*"
KINDS = {
    "lora": {LINEAR: LoRALinear, EMBEDDING: LoRAEmbedding, EXPERTS: LoRAExperts},
    "dora": {LINEAR: DoRALinear, EMBEDDING: DoRAEmbedding},
    "qa_lora": {LINEAR: QALoRALinear},
}
ADAPTED = tuple({kind for kinds in KINDS.values() for kind in kinds.values()})


def attach(
    model: nn.Module, adapter: LoRAConfig, *, seed: int, merged: bool = False
) -> list[str]:
    """Freeze the model and put adapters on its layers, dense or quantized.

    Args:
        merged: see `LoRALinear`; then only linear layers are adapted.

    Returns:
        The adapted paths within a block; whole ones for layers outside the blocks.

    Raises:
        UserError: no layer matches a pattern, or there are not so many blocks.
    """
    model.freeze()
    kinds = {LINEAR: LoRALinear} if merged else KINDS[adapter.type]
    chosen = _choose(model, adapter, kinds)
    key, layers = mx.random.key(seed), []
    for place, rank in sorted(chosen, key=lambda pair: pair[0].path):
        key, draw = mx.random.split(key)
        scale = adapter.scale(rank)
        layer = kinds[place.kind](place.layer, rank, scale, adapter.dropout, draw)
        if merged:
            layer.merged = True
        layers.append((place.path, layer))
    model.update_modules(tree_unflatten(layers))
    for _, layer in layers:
        layer.unfreeze(keys=list(layer.TRAINED), recurse=False)
    return sorted({place.key for place, _ in chosen})


def _choose(
    model: nn.Module, adapter: LoRAConfig, kinds
) -> list[tuple[TargetModule, int]]:
    """The layers that a pattern means, each with its rank."""
    places = [
        p for p in find_target_modules(model, adapter.num_layers) if p.kind in kinds
    ]
    if adapter.type == "qa_lora":
        places = [
            place for place in places if base_layer.is_affine_quantized(place.layer)
        ]
    ranks = adapter.ranks.items()
    for pattern, rank in ranks:
        if not any(_means(pattern, place, rank) for place in places):
            names = sorted({place.key for place in places})
            smaller = "a lower rank, or by name: " if pattern == AUTO else "there are: "
            raise UserError(
                f"no layer that {adapter.type} adapts here matches {pattern!r}",
                hint=smaller + ", ".join(names),
            )
    chosen = []
    for place in places:
        meant = (rank for pattern, rank in ranks if _means(pattern, place, rank))
        if rank := next(meant, None):
            chosen.append((place, rank))
    return chosen


def _means(pattern: str, place: TargetModule, rank: int) -> bool:
    if pattern == AUTO:
        return place.in_block and place.pays(rank)
    if pattern == EVERYTHING:
        return place.in_block
    return fnmatchcase(place.key, pattern)


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The adapted layers of a model by path."""
    return {p: m for p, m in model.named_modules() if isinstance(m, ADAPTED)}


def lr_multipliers(
    parameters: dict[str, mx.array], adapter: LoRAConfig
) -> dict[str, float]:
    """What the learning rate is multiplied by, by parameter, where it is not 1."""
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

    Rounding the sum of a quantized layer and its adapter to the old grid would lose
    what is less than a step of it, so such a layer becomes dense, and all the others.

    Args:
        base: the weights before training, by path.
        parameters: the trained parameters, adapters included.
        dtype: the type of weights that `base` has as codes; all others keep theirs.
    """
    result = {k: parameters.get(k, v) for k, v in base.items()}
    types = {k: v.dtype for k, v in base.items()}
    layers = adapted_layers(model)
    wrapped = {id(layer.frozen): path for path, layer in layers.items()}
    for path, module in model.named_modules():
        if base_layer.is_quantized(module):
            path = wrapped.get(id(module), path)
            names = ("weight", "scales", "biases", "global_scale")
            tensors = {n: result.pop(f"{path}.{n}", None) for n in names}
            result[f"{path}.weight"] = base_layer.dequantize(module, tensors)
            types[f"{path}.weight"] = dtype
    for path, layer in layers.items():
        trained = {name: parameters[f"{path}.{name}"] for name in layer.TRAINED}
        name = f"{path}.weight"
        result[name] = layer.merge(result[name], trained)
    return {k: v.astype(types[k]) for k, v in result.items()}
