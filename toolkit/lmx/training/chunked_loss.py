"""A model in two: the trunk that sees all tokens, and the head that needs but one."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ..models.hooks import ModuleProxy, find_blocks, replace_module
from .losses import cross_entropy_sum


class ChunkedLossUnsupported(Exception):
    """The model's head does not work on chunks of its trunk's output; says why."""


class TrunkHeadSplit:
    """A model whose head can be asked for the logits of chosen tokens alone.

    Trunk and head are the model's own code: once the trunk's output is looked at as it
    passes, once it is given in the trunk's place. So logit scales and soft-caps stay.

    Attributes:
        prefix: what the names of all parameters of the blocks begin with.

    Raises:
        CannotSplit: on random tokens, logits by chunks are not the model's own.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        blocks = find_blocks(model)
        if blocks is None or not blocks.path:
            raise ChunkedLossUnsupported("it has no trunk apart from its head")
        self.prefix = blocks.prefix
        parent, _, self._name = blocks.path.rpartition(".")
        self._owner = dict(model.named_modules())[parent]
        self._trunk = blocks.trunk
        self._verify()

    def hidden(self, inputs: mx.array, **settings) -> mx.array:
        """What the trunk gives to the head, [B, L, width]."""
        seen = []

        def call(*arguments, **settings):
            seen.append(self._trunk(*arguments, **settings))
            return seen[-1]

        # The logits are part of this, but nobody asks for them.
        with replace_module(self._owner, self._name, ModuleProxy(self._trunk, call)):
            self.model(inputs, **settings)
        if len(seen) != 1 or not isinstance(seen[0], mx.array) or seen[0].ndim != 3:
            raise ChunkedLossUnsupported("its trunk does not give one array")
        return seen[0]

    def logits(self, hidden: mx.array) -> mx.array:
        """What the head makes of [T, width]."""
        stand_in = ModuleProxy(self._trunk, lambda *_, **__: hidden[None])
        with replace_module(self._owner, self._name, stand_in):
            return self.model(mx.zeros((1, len(hidden)), mx.int32))[0]

    def _verify(self) -> None:
        training = self.model.training
        self.model.eval()
        tokens = mx.random.randint(0, 64, (2, 16), key=mx.random.key(0))
        own = self.model(tokens).astype(mx.float32)
        hidden = self.hidden(tokens)
        hidden = hidden.reshape(-1, hidden.shape[-1])
        # Chunks that begin and end in the middle of rows.
        parts = [self.logits(hidden[start : start + 5]) for start in range(0, 32, 5)]
        if any(part.shape[-1:] != own.shape[-1:] for part in parts):
            raise ChunkedLossUnsupported("its head needs more than its trunk's output")
        made = mx.concatenate(parts).reshape(own.shape).astype(mx.float32)
        exact = hidden.dtype == mx.float32
        allowed = (1e-4 if exact else 2**-7) * max(1.0, mx.abs(own).max().item())
        off = mx.abs(made - own).max().item()
        self.model.train(training)
        if not off <= allowed:
            raise ChunkedLossUnsupported(f"logits by chunks are off by {off:.2g}")


# --- from train.chunked: The loss by chunks of trained tokens: logits of a whole batch never exist.
#
# The gradients of a chunk are made while its logits are there (as in arXiv 2410.10989),
# so nothing is computed twice.


# A summed loss of logits [T, V] and labels [T, ...]; the first two are the next tokens
# and where they count.
Loss = Callable[..., mx.array]


class ChunkedLoss:
    """A loss of a model whose trunk runs on all tokens, the head on few.

    Args:
        chunk: tokens whose logits exist at once; None = all.

    Raises:
        CannotSplit: on random tokens, logits by chunks are not the model's own.
    """

    def __init__(self, model: nn.Module, chunk: int | None):
        self.model = model
        self.chunk = chunk
        self._split = TrunkHeadSplit(model)
        outside = {
            path: value
            for path, value in tree_flatten(model.trainable_parameters())
            if not path.startswith(self._split.prefix)
        }
        self._trained = self._used(outside)

    def __call__(
        self,
        inputs: mx.array,
        labels: Sequence[mx.array],
        places: mx.array | None = None,
        *,
        loss: Loss = cross_entropy_sum,
        **settings,
    ) -> mx.array:
        """The summed loss, in nats, ready to be differentiated.

        Args:
            inputs: int [B, L].
            labels: what the loss is given besides the logits, [B, L, ...] each.
            places: int [T], which of the B * L the head is for; None = all.
            loss: the sum of logits and labels.
            settings: what the model is called with besides the inputs.
        """
        hidden = self._split.hidden(inputs, **settings)
        hidden, *labels = _chosen(places, hidden, *labels)
        named = dict(tree_flatten(self.model.trainable_parameters()))

        @mx.custom_function
        def forward(hidden, *weights):
            return self._with_gradients(hidden, weights, labels, loss)

        @forward.vjp
        def _(_, cotangents, outputs):
            return tuple(cotangents[0].astype(g.dtype) * g for g in outputs[1:])

        return forward(hidden, *(named[path] for path in self._trained))[0]

    def value(
        self,
        inputs: mx.array,
        labels: Sequence[mx.array],
        places: mx.array | None = None,
        *,
        loss: Loss = cross_entropy_sum,
        **settings,
    ) -> mx.array:
        """The summed loss alone, without gradients."""
        hidden = self._split.hidden(inputs, **settings)
        flat = _chosen(places, hidden, *labels)
        total = mx.array(0.0)
        for part in self._parts(len(flat[0])):
            chunk, *own = mx.depends([x[part] for x in flat], [total])
            total = total + loss(self._split.logits(chunk), *own)
        return total

    def _with_gradients(self, hidden, weights, labels, loss) -> tuple[mx.array, ...]:
        """The sum, its gradient by `hidden`, and by each of the weights."""

        def summed(given, *labels):
            self._put(given["weights"])
            return loss(self._split.logits(given["hidden"]), *labels)

        total, by_hidden = mx.array(0.0), []
        by_weights = [mx.zeros(w.shape, mx.float32) for w in weights]
        for part in self._parts(len(hidden)):
            # One after the other, or the logits of all would be there at once.
            done = [total, *by_hidden[-1:], *by_weights]
            chunk, *own = mx.depends([x[part] for x in (hidden, *labels)], done)
            given = {"hidden": chunk, "weights": list(weights)}
            value, found = mx.value_and_grad(summed)(given, *own)
            total = total + value
            by_hidden.append(found["hidden"])
            sums = zip(by_weights, found["weights"], strict=True)
            by_weights = [a + g.astype(mx.float32) for a, g in sums]
        self._put(weights)
        pairs = zip(by_weights, weights, strict=True)
        by_weights = [g.astype(w.dtype) for g, w in pairs]
        return total, mx.concatenate(by_hidden), *by_weights

    def _put(self, weights) -> None:
        pairs = list(zip(self._trained, weights, strict=True))
        if pairs:
            self.model.update(tree_unflatten(pairs))

    def _parts(self, tokens: int) -> list[slice]:
        chunk = self.chunk or tokens
        return [slice(start, start + chunk) for start in range(0, tokens, chunk)]

    def _used(self, weights: dict[str, mx.array]) -> list[str]:
        """Which of the trained weights the head computes with."""
        names = list(weights)
        if not names:
            return []
        # Random ones: next to a zero matrix another one seems to be of no use.
        random = [
            mx.random.normal(v.shape, key=mx.random.key(i)).astype(v.dtype)
            for i, v in enumerate(weights.values())
        ]

        def total(values):
            self.model.update(tree_unflatten(list(zip(names, values, strict=True))))
            return mx.square(self._split.logits(hidden).astype(mx.float32)).sum()

        hidden = self._split.hidden(mx.zeros((1, 2), mx.int32))[0]
        found = mx.grad(total)(random)
        self.model.update(tree_unflatten(list(weights.items())))
        return [k for k, g in zip(names, found, strict=True) if mx.any(g != 0).item()]


def _chosen(places: mx.array | None, hidden: mx.array, *labels: mx.array):
    """Of all [B, L, ...], the rows at `places` of the B * L."""
    flat = [x.flatten(0, 1) for x in (hidden, *labels)]
    return flat if places is None else [x[places] for x in flat]
