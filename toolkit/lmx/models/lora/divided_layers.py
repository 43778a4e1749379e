"""LoRA on linear layers that the processes of a group hold together.

The two matrices are divided as the weight is, as in Megatron (arXiv 1909.08053). Of a
layer with divided outputs every rank has all of A and its columns of B; of one with
divided inputs its rows of A and all of B. So only x A [..., rank] is summed over ranks,
in the forward or the backward pass, and every gradient is whole where it is used:

    outputs divided    y_r = x W_r + f(x A) B_r          f: identity; sums gradients
    inputs divided     y = sum_r(x_r W_r) + sum_r(x_r A_r) B
"""

from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import sum_gradients

from .. import quantized_layers
from .layers import LoRALinear, init_lora_a

OUTPUTS_DIVIDED = (nn.AllToShardedLinear, nn.QuantizedAllToShardedLinear)
INPUTS_DIVIDED = (nn.ShardedToAllLinear, nn.QuantizedShardedToAllLinear)


class ColumnParallelLoRA(LoRALinear):
    """LoRA on a layer whose outputs are divided; B is [rank, out / N]."""

    DIVIDED_AXIS: ClassVar = {"lora_b": 1}

    def project(self, x: mx.array) -> mx.array:
        return sum_gradients(self.linear.group)(super().project(x))


class RowParallelLoRA(LoRALinear):
    """LoRA on a layer whose inputs are divided; A is [in / N, rank]."""

    DIVIDED_AXIS: ClassVar = {"lora_a": 0}

    def __init__(
        self, linear: nn.Module, rank: int, scale: float, dropout: float, key: mx.array
    ):
        super().__init__(linear, rank, scale, dropout, key)
        _, inputs = whole_shape(linear)
        whole = init_lora_a(inputs, rank, key)
        self._first = linear.group.rank() * len(self.lora_a)
        self.lora_a = mx.contiguous(whole[self._first : self._first + len(self.lora_a)])
        self._inputs, self._has_dropout = inputs, dropout > 0

    def project(self, x: mx.array) -> mx.array:
        if self._has_dropout:
            # The mask is that of one process: drawn for all inputs.
            width, padding = x.shape[-1], [(0, 0)] * (x.ndim - 1)
            last = self._inputs - self._first - width
            x = self.dropout(mx.pad(x, [*padding, (self._first, last)]))
            x = x[..., self._first : self._first + width]
        return mx.distributed.all_sum(x @ self.lora_a, group=self.linear.group)


def whole_shape(layer: nn.Module) -> tuple[int, ...]:
    """The shape [..., out, in] of a layer's weight in one process."""
    *experts, outputs, inputs = quantized_layers.weight_shape(layer)
    if isinstance(layer, OUTPUTS_DIVIDED):
        outputs *= layer.group.size()
    elif isinstance(layer, INPUTS_DIVIDED):
        inputs *= layer.group.size()
    return (*experts, outputs, inputs)
