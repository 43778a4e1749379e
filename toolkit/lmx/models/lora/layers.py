"""Adapters of linear layers: LoRA (arXiv 2106.09685), DoRA (arXiv 2402.09353)."""

from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from . import base_layer


class LoRALinear(nn.Module):
    """A frozen linear layer plus scale * (x A) B, with A [in, rank] and B [rank, out].

    With `merged` set, `linear.weight` already holds the (rounded) sum of both; then the
    forward is that one product, while A and B get the gradients the sum would give.
    With `grad_through_merge` set too, they get them through the sum and its own whole gradient.
    """

    TRAINED = ("lora_a", "lora_b")
    RANK_AXIS: ClassVar = {"lora_a": 1, "lora_b": 0}

    def __init__(
        self, linear: nn.Module, rank: int, scale: float, dropout: float, key: mx.array
    ):
        super().__init__()
        outputs, inputs = base_layer.weight_shape(linear)
        self.linear = linear
        # Kept as loaded: in quantization-aware training `linear.weight` is the sum.
        self._weight = linear.weight
        self.scale = scale
        self.dropout = nn.Dropout(dropout)
        self.lora_a = base_layer.init_lora_a(inputs, rank, key)
        self.lora_b = mx.zeros((rank, outputs))
        self.merged = self.grad_through_merge = False

    @property
    def frozen(self) -> nn.Module:
        """The wrapped layer."""
        return self.linear

    @property
    def loaded(self) -> mx.array:
        """The weight before training, as it was loaded."""
        return self._weight

    def __call__(self, x: mx.array) -> mx.array:
        if self.merged and self.grad_through_merge:
            return self.linear(x)
        if self.merged:
            y = _merged_product(
                x, self.linear.weight, self.lora_a, self.scale * self.lora_b
            )
            return y + self.linear.bias if "bias" in self.linear else y
        update = (self.dropout(x) @ self.lora_a) @ self.lora_b
        return self.linear(x) + (self.scale * update).astype(x.dtype)

    def merge(self, weight: mx.array, trained: dict[str, mx.array]) -> mx.array:
        """The weight plus scale * (A B) transposed, float32 [out, in].

        One library call, which compiling cannot fuse with its neighbours: the merge of
        the export has the very bits of the merge in training.
        """
        a, b = trained["lora_a"], trained["lora_b"]
        return mx.addmm(weight.astype(mx.float32), b.T, a.T, alpha=self.scale)


class DoRALinear(LoRALinear):
    """LoRA whose sum has rows of the learnt norms m [out]; its own are no variables."""

    TRAINED = ("lora_a", "lora_b", "m")

    def __init__(
        self, linear: nn.Module, rank: int, scale: float, dropout: float, key: mx.array
    ):
        super().__init__(linear, rank, scale, dropout, key)
        self._squares = base_layer.dequantized_weight(linear).square().sum(axis=1)
        self.m = mx.sqrt(self._squares)

    def __call__(self, x: mx.array) -> mx.array:
        bias = self.linear.bias if "bias" in self.linear else 0.0
        product = self.linear(self.lora_a.T.astype(x.dtype)) - bias
        b = self.lora_b.T
        norms = base_layer.row_norms(
            self._squares, product, b, self.lora_a.T, self.scale
        )
        ratio = (self.m / norms).astype(x.dtype)
        # Not ratio * (y - bias) + bias, which would not begin as the base.
        return ratio * super().__call__(x) + (1 - ratio) * bias

    def merge(self, weight: mx.array, trained: dict[str, mx.array]) -> mx.array:
        """The sum with its rows rescaled to m, float32 [out, in]."""
        return base_layer.rescale_rows(super().merge(weight, trained), trained["m"])


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


# --- from model.adapters.embedding: Adapters of embeddings, which may be the output head too.


class LoRAEmbedding(nn.Module):
    """A frozen embedding plus scale * A B: A is [tokens, rank], B [rank, width]."""

    TRAINED = ("lora_a", "lora_b")
    RANK_AXIS: ClassVar = {"lora_a": 1, "lora_b": 0}

    def __init__(
        self, embedding: nn.Module, rank: int, scale: float, dropout: float, key
    ):
        super().__init__()
        tokens, width = base_layer.weight_shape(embedding)
        self.embedding = embedding
        self.scale = scale
        self.dropout = nn.Dropout(dropout)
        self.lora_a = base_layer.init_lora_a(tokens, rank, key)
        self.lora_b = mx.zeros((rank, width))

    @property
    def frozen(self) -> nn.Module:
        """The wrapped layer."""
        return self.embedding

    def __call__(self, tokens: mx.array) -> mx.array:
        y = self.embedding(tokens)
        return y + self._update(tokens).astype(y.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits [..., tokens] of x [..., width], where the embedding is the head."""
        update = (self.dropout(x) @ self.lora_b.T) @ self.lora_a.T
        return self.embedding.as_linear(x) + (self.scale * update).astype(x.dtype)

    def merge(self, weight: mx.array, trained: dict[str, mx.array]) -> mx.array:
        """The weight plus scale * A B, float32 [tokens, width]."""
        a, b = trained["lora_a"], trained["lora_b"]
        return mx.addmm(weight.astype(mx.float32), a, b, alpha=self.scale)

    def _update(self, tokens: mx.array) -> mx.array:
        return self.dropout(self.scale * (self.lora_a[tokens] @ self.lora_b))


class DoRAEmbedding(LoRAEmbedding):
    """LoRA whose sum has rows of the learnt norms m [tokens].

    Stock mlx-lm knows it on dense embeddings only.
    """

    TRAINED = ("lora_a", "lora_b", "m")

    def __init__(
        self, embedding: nn.Module, rank: int, scale: float, dropout: float, key
    ):
        super().__init__(embedding, rank, scale, dropout, key)
        self._squares = base_layer.dequantized_weight(embedding).square().sum(axis=1)
        self.m = mx.sqrt(self._squares)

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
        norms = base_layer.row_norms(
            self._squares, product, self.lora_a, self.lora_b, self.scale
        )
        return (self.m / norms).astype(x.dtype) * super().as_linear(x)

    def merge(self, weight: mx.array, trained: dict[str, mx.array]) -> mx.array:
        """The sum with its rows rescaled to m, float32 [tokens, width]."""
        return base_layer.rescale_rows(super().merge(weight, trained), trained["m"])


# --- from model.adapters.experts: LoRA of the experts of a mixture, every expert with matrices of its own.


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
        experts, outputs, inputs = base_layer.weight_shape(linear)
        self.linear = linear
        self.scale = scale
        self.dropout = nn.Dropout(dropout)
        a = base_layer.init_lora_a(inputs, rank, key, before=(experts,))
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
