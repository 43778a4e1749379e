"""Adapter layers: LoRA (arXiv 2106.09685) and DoRA (2402.09353)."""

import math
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from .. import quantized_layers


class AdapterLayer(nn.Module):
    """A frozen layer, `linear` or `embedding`, with trainable adapter parameters.

    Attributes:
        TRAINABLE: names of the adapter parameters.
        RANK_AXIS: the axis of the rank, by parameter.
    """

    TRAINABLE: ClassVar = ("lora_a", "lora_b")
    RANK_AXIS: ClassVar = {"lora_a": 1, "lora_b": 0}

    @property
    def base_layer(self) -> nn.Module:
        """The wrapped layer."""
        return self.linear


class LoRALinear(AdapterLayer):
    """A frozen linear layer plus scale * (x A) B, with A [in, rank] and B [rank, out].

    If `merged` is set, `linear.weight` holds the (quantized) sum of both. The forward
    pass is then one product, and A and B get the gradients that the sum would give. If
    `grad_through_merge` is set too, A and B get them through the sum, from the gradient
    of the whole weight.
    """

    def __init__(
        self, linear: nn.Module, rank: int, scale: float, dropout: float, key: mx.array
    ):
        super().__init__()
        outputs, inputs = quantized_layers.weight_shape(linear)
        self.linear = linear
        # In quantization-aware training `linear.weight` becomes the sum.
        self._base_weight = linear.weight
        self.scale = scale
        self.dropout = nn.Dropout(dropout)
        self.lora_a = init_lora_a(inputs, rank, key)
        self.lora_b = mx.zeros((rank, outputs))
        self.merged = self.grad_through_merge = False

    @property
    def base_weight(self) -> mx.array:
        """The weight before training."""
        return self._base_weight

    def __call__(self, x: mx.array) -> mx.array:
        if self.merged and self.grad_through_merge:
            return self.linear(x)
        if self.merged:
            y = _merged_product(
                x, self.linear.weight, self.lora_a, self.scale * self.lora_b
            )
            return y + self.linear.bias if "bias" in self.linear else y
        update = self.project(x) @ self.lora_b
        return self.linear(x) + (self.scale * update).astype(x.dtype)

    def project(self, x: mx.array) -> mx.array:
        """x A [..., rank], after dropout."""
        return self.dropout(x) @ self.lora_a

    def merge(self, weight: mx.array, trained: dict[str, mx.array]) -> mx.array:
        """The weight plus scale * (A B) transposed, float32 [out, in].

        One library call, which compilation does not fuse with its neighbours: the
        merge of the export gives the bits of the merge in training.
        """
        a, b = trained["lora_a"], trained["lora_b"]
        return mx.addmm(weight.astype(mx.float32), b.T, a.T, alpha=self.scale)


class TrainedNorms:
    """A class in front of LoRA's: rows of the merged weight have the trained norms m.

    The norms of the sum itself are constants in the backward pass.
    """

    TRAINABLE: ClassVar = ("lora_a", "lora_b", "m")

    def __init__(self, layer: nn.Module, *settings: Any):
        super().__init__(layer, *settings)
        self._squares = quantized_layers.dequantized_weight(layer).square().sum(axis=1)
        self.m = mx.sqrt(self._squares)

    def merge(self, weight: mx.array, trained: dict[str, mx.array]) -> mx.array:
        """The LoRA sum with its rows rescaled to m, float32."""
        merged = super().merge(weight, trained)
        norms = mx.sqrt(merged.square().sum(axis=1))
        return (trained["m"] / norms)[:, None] * merged


class DoRALinear(TrainedNorms, LoRALinear):
    """DoRA of a linear layer."""

    def __call__(self, x: mx.array) -> mx.array:
        bias = self.linear.bias if "bias" in self.linear else 0.0
        product = self.linear(self.lora_a.T.astype(x.dtype)) - bias
        b = self.lora_b.T
        norms = row_norms(self._squares, product, b, self.lora_a.T, self.scale)
        ratio = (self.m / norms).astype(x.dtype)
        # ratio * (y - bias) + bias would not start exactly as the base layer.
        return ratio * super().__call__(x) + (1 - ratio) * bias


@mx.custom_function
def _merged_product(x, weight, lora_a, scaled_b):
    return x @ weight.T


@_merged_product.vjp
def _merged_product_vjp(primals, cotangent, _):
    x, weight, lora_a, scaled_b = primals
    tokens = x.reshape(-1, x.shape[-1])
    gradients = cotangent.reshape(-1, cotangent.shape[-1])
    return (
        cotangent @ weight,
        mx.zeros_like(weight),
        tokens.T @ (gradients @ scaled_b.T),
        (tokens @ lora_a).T @ gradients,
    )


class LoRAEmbedding(AdapterLayer):
    """A frozen embedding, which may also be the output head, plus scale * A B.

    A is [tokens, rank], B is [rank, width].
    """

    def __init__(
        self, embedding: nn.Module, rank: int, scale: float, dropout: float, key
    ):
        super().__init__()
        tokens, width = quantized_layers.weight_shape(embedding)
        self.embedding = embedding
        self.scale = scale
        self.dropout = nn.Dropout(dropout)
        self.lora_a = init_lora_a(tokens, rank, key)
        self.lora_b = mx.zeros((rank, width))

    @property
    def base_layer(self) -> nn.Module:
        return self.embedding

    def __call__(self, tokens: mx.array) -> mx.array:
        y = self.embedding(tokens)
        update = self.dropout(self.scale * (self.lora_a[tokens] @ self.lora_b))
        return y + update.astype(y.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits [..., tokens] of x [..., width], where the embedding is the head."""
        update = (self.dropout(x) @ self.lora_b.T) @ self.lora_a.T
        return self.embedding.as_linear(x) + (self.scale * update).astype(x.dtype)

    def merge(self, weight: mx.array, trained: dict[str, mx.array]) -> mx.array:
        """The weight plus scale * A B, float32 [tokens, width]."""
        a, b = trained["lora_a"], trained["lora_b"]
        return mx.addmm(weight.astype(mx.float32), a, b, alpha=self.scale)


class DoRAEmbedding(TrainedNorms, LoRAEmbedding):
    """DoRA of an embedding. Stock mlx-lm has it for dense embeddings only."""

    def __call__(self, tokens: mx.array) -> mx.array:
        y = self.embedding(tokens)
        update = self.scale * (self.lora_a[tokens] @ self.lora_b)
        norms = mx.sqrt((y + update).astype(mx.float32).square().sum(axis=-1))
        ratio = self.m[tokens] / mx.stop_gradient(norms)
        return ratio[..., None].astype(y.dtype) * (
            y + self.dropout(update).astype(y.dtype)
        )

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits [..., tokens] of x [..., width], where the embedding is the head."""
        product = self.embedding.as_linear(self.lora_b.astype(x.dtype))
        norms = row_norms(self._squares, product, self.lora_a, self.lora_b, self.scale)
        return (self.m / norms).astype(x.dtype) * super().as_linear(x)


class LoRAExperts(AdapterLayer):
    """Frozen experts plus scale * B A of the experts that the router chose.

    A is [experts, rank, in], B is [experts, out, rank]: mlx-lm's LoRASwitchLinear.
    """

    RANK_AXIS: ClassVar = {"lora_a": 1, "lora_b": 2}

    def __init__(
        self, linear: nn.Module, rank: int, scale: float, dropout: float, key: mx.array
    ):
        super().__init__()
        experts, outputs, inputs = quantized_layers.weight_shape(linear)
        self.linear = linear
        self.scale = scale
        self.dropout = nn.Dropout(dropout)
        a = init_lora_a(inputs, rank, key, before=(experts,))
        self.lora_a = mx.contiguous(a.swapaxes(1, 2))
        self.lora_b = mx.zeros((experts, outputs, rank))

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


def init_lora_a(
    rows: int, columns: int, key: mx.array, *, before: tuple[int, ...] = ()
) -> mx.array:
    """Initial A of a layer with `rows` inputs, uniform as in mlx-lm."""
    bound = 1 / math.sqrt(rows)
    return mx.random.uniform(-bound, bound, (*before, rows, columns), key=key)


def row_norms(
    squares: mx.array, product: mx.array, left: mx.array, right: mx.array, scale: float
) -> mx.array:
    """Norms of the rows of W + scale * left right, detached, without that sum.

    Args:
        squares: squared norms of the rows of W [rows, columns].
        product: right W^T, [rank, rows].
        left: [rows, rank].
        right: [rank, columns].
    """
    product, left, right = (v.astype(mx.float32) for v in (product, left, right))
    crossed = (left * product.T).sum(axis=1)
    update = ((left @ (right @ right.T)) * left).sum(axis=1)
    total = squares + 2 * scale * crossed + scale**2 * update
    return mx.stop_gradient(mx.sqrt(total))
