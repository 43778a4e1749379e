"""Adapters that the biases of a quantized layer take whole (arXiv 2309.14717)."""

import math
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from . import base_layer


class QALoRALinear(nn.Module):
    """A frozen layer in codes plus scale * (s A) B: s [groups] are sums of x by group.

    All weights of a group get the same, which is what a bias of its grid is. The biases
    of `linear` already are the sum, as it will be stored, so the forward is its one
    product; A [groups, rank] and B [rank, out] get the gradients the sum would give.
    """

    TRAINED = ("lora_a", "lora_b")
    RANK_AXIS: ClassVar = {"lora_a": 1, "lora_b": 0}

    def __init__(
        self, linear: nn.Module, rank: int, scale: float, dropout: float, key: mx.array
    ):
        super().__init__()
        outputs, inputs = base_layer.weight_shape(linear)
        self.linear = linear
        # Kept as loaded, for those of `linear` are the sum, in the type of training.
        self._biases = linear.biases
        self.scale = scale
        # As long a step as LoRA's, though it sees sums of so many inputs.
        a = base_layer.init_lora_a(inputs // linear.group_size, rank, key)
        self.lora_a = a / math.sqrt(linear.group_size)
        self.lora_b = mx.zeros((rank, outputs))

    @property
    def frozen(self) -> nn.Module:
        """The wrapped layer."""
        return self.linear

    def __call__(self, x: mx.array) -> mx.array:
        y = self.linear(x)
        if not self.training:
            return y
        # The product has the slope by x; what this zero has are those by A and B.
        groups = mx.stop_gradient(x).reshape(*x.shape[:-1], -1, self.linear.group_size)
        update = (groups.sum(axis=-1) @ self.lora_a) @ self.lora_b
        return y + (self.scale * (update - mx.stop_gradient(update))).astype(y.dtype)

    def biases(self, trained: dict[str, mx.array]) -> mx.array:
        """The biases [out, groups] plus scale * (A B) transposed, in the type stored.

        One library call, as `LoRALinear.merge`.
        """
        a, b, loaded = trained["lora_a"], trained["lora_b"], self._biases
        merged = mx.addmm(loaded.astype(mx.float32), b.T, a.T, alpha=self.scale)
        return merged.astype(loaded.dtype)

    def merge(self, weight: mx.array, trained: dict[str, mx.array]) -> mx.array:
        """A dense weight plus what every weight of a group gets, float32 [out, in]."""
        whole = self.spread(trained)
        update = (whole["lora_a"] @ whole["lora_b"]).T
        return weight.astype(mx.float32) + self.scale * update

    def spread(self, trained: dict[str, mx.array]) -> dict[str, mx.array]:
        """The same adapter as plain LoRA's matrices, A [in, rank] and B."""
        a = mx.repeat(trained["lora_a"], self.linear.group_size, axis=0)
        return trained | {"lora_a": a}
