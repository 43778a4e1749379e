"""A quantized model whose tensors can be exchanged, judged by what it predicts."""

from itertools import islice

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ..train.distillation import kl_sum
from ..train.targets import Targets


class Student:
    """The model as it is served: MLX's own quantized layers, reloaded from disk.

    Args:
        model: as loaded; its parameters may have been cast to a type to compute in.
        dtype: the type its checkpoint stores.
    """

    def __init__(self, model: nn.Module, dtype: mx.Dtype):
        self.model = model
        self.dtype = dtype
        self._types = {k: v.dtype for k, v in tree_flatten(model.parameters())}

    @property
    def affine(self) -> dict[str, nn.Module]:
        """Its layers with scales and biases, by path; those of experts too."""
        return {
            path: module
            for path, module in self.model.named_modules()
            if getattr(module, "mode", None) == "affine" and "scales" in module
        }

    def put(self, tensors: dict[str, mx.array]) -> None:
        """Take tensors by name, in the types they are stored in."""
        cast = {k: v.astype(self._types[k]) for k, v in tensors.items()}
        self.model.update(tree_unflatten(list(cast.items())))

    def served(self, masters: dict[str, mx.array]) -> dict[str, mx.array]:
        """Float32 masters as the forward takes them, by way of the type stored."""
        return {
            k: v.astype(self.dtype).astype(self._types[k]) for k, v in masters.items()
        }

    def divergence(self, targets: Targets, parts: int | None = None) -> float:
        """KL(teacher || this model as it is), in nats, mean over what counts.

        Args:
            parts: the first ones alone, that many; None = all.
        """
        total = count = 0
        shown = zip(targets.tokens, targets.counted, targets, strict=True)
        for tokens, counted, target in islice(shown, parts):
            total += kl_sum(self.model(tokens), target, counted).item()
            count += counted.sum().item()
        return total / count
