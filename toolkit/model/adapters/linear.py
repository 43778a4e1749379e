"""Adapters of linear layers: LoRA (arXiv 2106.09685), DoRA (arXiv 2402.09353)."""

from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from . import weights


class LoRALinear(nn.Module):
    """A frozen linear layer plus scale * (x A) B, with A [in, rank] and B [rank, out].

    With `merged` set, `linear.weight` already holds the (rounded) sum of both; then the
    forward is that one product, while A and B get the gradients the sum would give.
    With `is_whole` set too, they get them through the sum and its own whole gradient.
    """

    TRAINED = ("lora_a", "lora_b")
    RANK_AXIS: ClassVar = {"lora_a": 1, "lora_b": 0}

    def __init__(
        self, linear: nn.Module, rank: int, scale: float, dropout: float, key: mx.array
    ):
        super().__init__()
        outputs, inputs = weights.shape(linear)
        self.linear = linear
        # Kept as loaded: in quantization-aware training `linear.weight` is the sum.
        self._weight = linear.weight
        self.scale = scale
        self.dropout = nn.Dropout(dropout)
        self.lora_a = weights.start(inputs, rank, key)
        self.lora_b = mx.zeros((rank, outputs))
        self.merged = self.is_whole = False

    @property
    def frozen(self) -> nn.Module:
        """The wrapped layer."""
        return self.linear

    @property
    def loaded(self) -> mx.array:
        """The weight before training, as it was loaded."""
        return self._weight

    def __call__(self, x: mx.array) -> mx.array:
        if self.merged and self.is_whole:
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
        self._squares = weights.own(linear).square().sum(axis=1)
        self.m = mx.sqrt(self._squares)

    def __call__(self, x: mx.array) -> mx.array:
        bias = self.linear.bias if "bias" in self.linear else 0.0
        product = self.linear(self.lora_a.T.astype(x.dtype)) - bias
        b = self.lora_b.T
        norms = weights.row_norms(self._squares, product, b, self.lora_a.T, self.scale)
        ratio = (self.m / norms).astype(x.dtype)
        # Not ratio * (y - bias) + bias, which would not begin as the base.
        return ratio * super().__call__(x) + (1 - ratio) * bias

    def merge(self, weight: mx.array, trained: dict[str, mx.array]) -> mx.array:
        """The sum with its rows rescaled to m, float32 [out, in]."""
        return weights.rescaled(super().merge(weight, trained), trained["m"])


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
