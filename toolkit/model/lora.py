"""LoRA (arXiv 2106.09685): low-rank updates of linear layers, in mlx-lm's names."""

import json
import math
from fnmatch import fnmatchcase
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..errors import UserError

# The router of a mixture of experts decides who computes; adapting it unbalances them.
ROUTERS = ("gate", "router", "shared_expert_gate")


class LoRALinear(nn.Module):
    """A frozen linear layer plus scale * (x A) B, with A [in, rank] and B [rank, out].

    With `merged` set, `linear.weight` already holds the (rounded) sum of both; then the
    forward is that one product, while A and B get the gradients the sum would give.
    """

    def __init__(
        self, linear: nn.Module, rank: int, scale: float, dropout: float, key: mx.array
    ):
        super().__init__()
        outputs, inputs = linear.weight.shape
        bound = 1 / math.sqrt(inputs)
        self.linear = linear
        # Kept as loaded: in quantization-aware training `linear.weight` is the sum.
        self._weight = linear.weight
        self.scale = scale
        self.dropout = nn.Dropout(dropout)
        self.lora_a = mx.random.uniform(-bound, bound, (inputs, rank), key=key)
        self.lora_b = mx.zeros((rank, outputs))
        self.merged = False

    def __call__(self, x: mx.array) -> mx.array:
        if self.merged:
            y = _merged_product(
                x, self.linear.weight, self.lora_a, self.scale * self.lora_b
            )
            return y + self.linear.bias if "bias" in self.linear else y
        update = (self.dropout(x) @ self.lora_a) @ self.lora_b
        return self.linear(x) + (self.scale * update).astype(x.dtype)

    def merge(self, lora_a: mx.array, lora_b: mx.array) -> mx.array:
        """The frozen weight plus scale * (A B) transposed, float32 [out, in].

        One library call, which compiling cannot fuse with its neighbours: the merge of
        the export has the very bits of the merge in training.
        """
        weight = self._weight.astype(mx.float32)
        return mx.addmm(weight, lora_b.T, lora_a.T, alpha=self.scale)


@mx.custom_function
def _merged_product(x, weight, lora_a, scaled_b):
    return x @ weight.T


@_merged_product.vjp
def _merged_product_vjp(primals, cotangent, _):
    x, weight, lora_a, scaled_b = primals
    rows = x.reshape(-1, x.shape[-1])
    errors = cotangent.reshape(-1, cotangent.shape[-1])
    return (
        cotangent @ weight,
        mx.zeros_like(weight),
        rows.T @ (errors @ scaled_b.T),
        (rows @ lora_a).T @ errors,
    )


def attach(
    model: nn.Module,
    *,
    rank: int,
    scale: float,
    dropout: float,
    patterns: list[str],
    seed: int,
    merged: bool,
) -> list[str]:
    """Freeze the model and put adapters on its blocks' linear layers.

    Args:
        patterns: shell patterns of a layer's path within its block, `self_attn.q_proj`.
        merged: see `LoRALinear`.

    Returns:
        The adapted paths within a block.

    Raises:
        UserError: no layer matches a pattern.
    """
    model.freeze()
    chosen = _choose(model, patterns)
    key, layers = mx.random.key(seed), []
    for path, (_, module) in sorted(chosen.items()):
        key, draw = mx.random.split(key)
        layer = LoRALinear(module, rank, scale, dropout, draw)
        layer.merged = merged
        layers.append((path, layer))
    model.update_modules(tree_unflatten(layers))
    for _, layer in layers:
        layer.unfreeze(keys=["lora_a", "lora_b"], recurse=False)
    return sorted({inner for inner, _ in chosen.values()})


def _choose(model: nn.Module, patterns: list[str]) -> dict[str, tuple[str, nn.Module]]:
    """By path: the linear layers that match, and their path within their block."""
    paths = {id(module): path for path, module in model.named_modules()}
    linear = [
        (paths[id(module)], inner, module)
        for block in model.layers
        for inner, module in block.named_modules()
        if type(module) is nn.Linear and inner.rpartition(".")[2] not in ROUTERS
    ]
    inside = sorted({inner for _, inner, _ in linear})
    for pattern in patterns:
        if not any(fnmatchcase(inner, pattern) for inner in inside):
            raise UserError(
                f"no linear layer of this model matches {pattern!r}",
                hint=f"there are: {', '.join(inside)}",
            )
    return {
        path: (inner, module)
        for path, inner, module in linear
        if any(fnmatchcase(inner, pattern) for pattern in patterns)
    }


def save(
    folder: Path,
    parameters: dict[str, mx.array],
    *,
    rank: int,
    scale: float,
    dropout: float,
    keys: list[str],
    num_layers: int,
) -> None:
    """Write adapters.safetensors and adapter_config.json as mlx-lm loads them.

    `num_layers` is the real number of blocks: mlx-swift cannot read mlx-lm's -1.
    """
    mx.save_safetensors(str(folder / "adapters.safetensors"), parameters)
    config = {
        "fine_tune_type": "lora",
        "num_layers": num_layers,
        "lora_parameters": {
            "rank": rank,
            "scale": scale,
            "dropout": dropout,
            "keys": keys,
        },
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=4) + "\n")


def adapted(model: nn.Module) -> dict[str, LoRALinear]:
    """The adapted layers of a model by path."""
    return {p: m for p, m in model.named_modules() if isinstance(m, LoRALinear)}


def fused(
    model: nn.Module, base: dict[str, mx.array], parameters: dict[str, mx.array]
) -> dict[str, mx.array]:
    """The weights of a trained model without adapters, by mlx-lm's paths.

    Args:
        base: the weights before training, by path.
        parameters: the trained parameters, adapters included.
    """
    weights = {k: parameters.get(k, v) for k, v in base.items()}
    for path, layer in adapted(model).items():
        pair = (parameters[f"{path}.lora_a"], parameters[f"{path}.lora_b"])
        weights[f"{path}.weight"] = layer.merge(*pair)
    return weights
