"""A loss over chunks of tokens: the logits of a batch are never in memory at once.

The gradients of a chunk are computed while its logits exist (as in arXiv 2410.10989),
so nothing is computed twice.
"""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ..data.batching import BatchArrays
from ..models.blockwise import TrunkHeadSplit
from ..models.cross_entropy import token_log_probs
from .losses import LossModel


class ChunkedLossModel(LossModel):
    """A model whose trunk runs on all tokens, and whose head runs on chunks of tokens.

    Only trainable parameters get gradients.

    Args:
        chunk: tokens whose logits exist at once; None = all.

    Raises:
        NoTrunkHeadSplit: on random tokens, logits by chunks differ from the model's.
    """

    uses_places = True

    def __init__(self, module: nn.Module, chunk: int | None):
        super().__init__(module)
        self.chunk = chunk
        self._split = TrunkHeadSplit(module)
        self._head_paths = self._used_by_head(
            {
                path: value
                for path, value in tree_flatten(module.trainable_parameters())
                if not path.startswith(self._split.prefix)
            }
        )

    def sum_over_tokens(
        self, batch: BatchArrays, function: Callable[..., mx.array], *labels: mx.array
    ) -> mx.array:
        hidden = self._split.hidden(batch.inputs, **self._masks(batch))
        labels = batch.next_tokens, batch.mask, *labels
        hidden, *labels = _select(batch.places, hidden, *labels)
        if not self.module.training:
            total = mx.array(0.0)
            for tokens in self._chunks(len(hidden)):
                chunk = [x[tokens] for x in (hidden, *labels)]
                chunk, *chunk_labels = mx.depends(chunk, [total])
                total = total + function(self._split.logits(chunk), *chunk_labels)
            return total

        @mx.custom_function
        def forward(hidden, *weights):
            return self._with_gradients(hidden, weights, labels, function)

        @forward.vjp
        def _(_, cotangents, outputs):
            return tuple(cotangents[0].astype(g.dtype) * g for g in outputs[1:])

        return forward(hidden, *self._head_weights())[0]

    def log_probs(self, batch: BatchArrays, temperature: float = 1.0) -> mx.array:
        # The backward pass computes the logits of a chunk again: what the loss makes of
        # a log-probability may depend on all others.
        inputs, places = batch.inputs, batch.places
        hidden = self._split.hidden(inputs)
        hidden, targets = _select(places, hidden, batch.next_tokens)
        weights = self._head_weights()

        @mx.custom_function
        def forward(hidden, *weights):
            logps = []
            for tokens in self._chunks(len(hidden)):
                chunk = [hidden[tokens], targets[tokens]]
                chunk, target = mx.depends(chunk, logps[-1:])
                logits = self._split.logits(chunk)
                logps.append(token_log_probs(logits, target, temperature))
            return mx.concatenate(logps)

        @forward.vjp
        def _(primals, cotangent, _):
            def weighted_sum(logits, target, _, cotangent):
                logps = token_log_probs(logits, target, temperature)
                return (logps * cotangent).sum()

            # A single primal is no tuple.
            values = primals if weights else (primals,)
            labels = [targets, mx.ones_like(targets), cotangent]
            _, *gradients = self._with_gradients(
                values[0], values[1:], labels, weighted_sum
            )
            return tuple(gradients)

        logps = forward(hidden, *weights)
        if places is None:
            return logps.reshape(inputs.shape)
        return mx.zeros(inputs.size).at[places].add(logps).reshape(inputs.shape)

    def _with_gradients(self, hidden, weights, labels, loss) -> tuple[mx.array, ...]:
        """The sum, and its gradients with respect to `hidden` and the weights."""

        def loss_sum(inputs, *labels):
            self._set_weights(inputs["weights"])
            return loss(self._split.logits(inputs["hidden"]), *labels)

        total, hidden_grads, weight_grads = mx.array(0.0), [], []
        for tokens in self._chunks(len(hidden)):
            # One chunk after the other, or the logits of all chunks would be in memory.
            done = [total, *hidden_grads[-1:], *weight_grads]
            chunk = [x[tokens] for x in (hidden, *labels)]
            chunk, *chunk_labels = mx.depends(chunk, done)
            inputs = {"hidden": chunk, "weights": list(weights)}
            value, gradients = mx.value_and_grad(loss_sum)(inputs, *chunk_labels)
            total = total + value
            hidden_grads.append(gradients["hidden"])
            # The sums are transposed, as MLX computes these gradients: a sum of two
            # layouts is slow.
            chunk_grads = [g.astype(mx.float32) for g in gradients["weights"]]
            if weight_grads:
                pairs = zip(weight_grads, chunk_grads, strict=True)
                chunk_grads = [a + g for a, g in pairs]
            weight_grads = chunk_grads
        self._set_weights(weights)
        pairs = zip(weight_grads, weights, strict=True)
        weight_grads = [g.astype(w.dtype) for g, w in pairs]
        return total, mx.concatenate(hidden_grads), *weight_grads

    def _head_weights(self) -> list[mx.array]:
        parameters = dict(tree_flatten(self.module.parameters()))
        return [parameters[path] for path in self._head_paths]

    def _set_weights(self, weights) -> None:
        pairs = list(zip(self._head_paths, weights, strict=True))
        if pairs:
            self.module.update(tree_unflatten(pairs))

    def _chunks(self, tokens: int) -> list[slice]:
        chunk = self.chunk or tokens
        return [slice(start, start + chunk) for start in range(0, tokens, chunk)]

    def _used_by_head(self, weights: dict[str, mx.array]) -> list[str]:
        """The paths of the trained weights that the head computes with."""
        paths = list(weights)
        if not paths:
            return []
        # Random weights: multiplied by a zero matrix a weight would have no gradient.
        random = [
            mx.random.normal(v.shape, key=mx.random.key(i)).astype(v.dtype)
            for i, v in enumerate(weights.values())
        ]

        def total(values):
            self.module.update(tree_unflatten(list(zip(paths, values, strict=True))))
            return mx.square(self._split.logits(hidden).astype(mx.float32)).sum()

        hidden = self._split.hidden(mx.zeros((1, 2), mx.int32))[0]
        gradients = mx.grad(total)(random)
        self.module.update(tree_unflatten(list(weights.items())))
        pairs = zip(paths, gradients, strict=True)
        return [path for path, g in pairs if mx.any(g != 0).item()]


def _select(places: mx.array | None, hidden: mx.array, *labels: mx.array):
    """The positions `places` of arrays [B, L, ...], flattened to [B * L, ...]."""
    flat = [x.flatten(0, 1) for x in (hidden, *labels)]
    return flat if places is None else [x[places] for x in flat]
