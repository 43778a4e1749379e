"""Adapters of embeddings, which may be the output head too."""

from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from . import weights


class LoRAEmbedding(nn.Module):
    """A frozen embedding plus scale * A B: A is [tokens, rank], B [rank, width]."""

    TRAINED = ("lora_a", "lora_b")
    RANK_AXIS: ClassVar = {"lora_a": 1, "lora_b": 0}

    def __init__(
        self, embedding: nn.Module, rank: int, scale: float, dropout: float, key
    ):
        super().__init__()
        tokens, width = weights.shape(embedding)
        self.embedding = embedding
        self.scale = scale
        self.dropout = nn.Dropout(dropout)
        self.lora_a = weights.start(tokens, rank, key)
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
        self._squares = weights.own(embedding).square().sum(axis=1)
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
        norms = weights.row_norms(
            self._squares, product, self.lora_a, self.lora_b, self.scale
        )
        return (self.m / norms).astype(x.dtype) * super().as_linear(x)

    def merge(self, weight: mx.array, trained: dict[str, mx.array]) -> mx.array:
        """The sum with its rows rescaled to m, float32 [tokens, width]."""
        return weights.rescaled(super().merge(weight, trained), trained["m"])
