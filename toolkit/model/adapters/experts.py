"""LoRA of the experts of a mixture, every expert with matrices of its own."""

from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from . import weights


class LoRAExperts(nn.Module):
    """A frozen expert layer plus scale * B A of the experts that the router chose.

    A is [experts, rank, in], B is [experts, out, rank]: mlx-lm's LoRASwitchLinear.
    """

    TRAINED = ("lora_a", "lora_b")
    RANK_AXIS: ClassVar = {"lora_a": 1, "lora_b": 2}

    def __init__(
        self, linear: nn.Module, rank: int, scale: float, dropout: float, key: mx.array
    ):
        super().__init__()
        experts, outputs, inputs = weights.shape(linear)
        self.linear = linear
        self.scale = scale
        self.dropout = nn.Dropout(dropout)
        a = weights.start(inputs, rank, key, before=(experts,))
        self.lora_a = mx.contiguous(a.swapaxes(1, 2))
        self.lora_b = mx.zeros((experts, outputs, rank))

    @property
    def frozen(self) -> nn.Module:
        """The wrapped layer."""
        return self.linear

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False):
        choice = {"rhs_indices": indices, "sorted_indices": sorted_indices}
        update = self.dropout(x)
        for matrix in (self.lora_a, self.lora_b):
            update = mx.gather_mm(update, matrix.swapaxes(1, 2), **choice)
        return self.linear(x, indices, sorted_indices=sorted_indices) + (
            self.scale * update
        ).astype(x.dtype)

    def merge(self, weight: mx.array, trained: dict[str, mx.array]) -> mx.array:
        """The weight plus scale * B A, float32 [experts, out, in]."""
        a, b = trained["lora_a"], trained["lora_b"]
        return weight.astype(mx.float32) + self.scale * (b @ a)
