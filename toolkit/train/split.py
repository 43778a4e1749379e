"""A model in two: the trunk that sees all tokens, and the head that needs but one."""

import mlx.core as mx
import mlx.nn as nn

from ..model.blocks import StandIn, find_blocks, swapped


class CannotSplit(Exception):
    """The model's head does not work on chunks of its trunk's output; says why."""


class Split:
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
            raise CannotSplit("it has no trunk apart from its head")
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
        with swapped(self._owner, self._name, StandIn(self._trunk, call)):
            self.model(inputs, **settings)
        if len(seen) != 1 or not isinstance(seen[0], mx.array) or seen[0].ndim != 3:
            raise CannotSplit("its trunk does not give one array")
        return seen[0]

    def logits(self, hidden: mx.array) -> mx.array:
        """What the head makes of [T, width]."""
        stand_in = StandIn(self._trunk, lambda *_, **__: hidden[None])
        with swapped(self._owner, self._name, stand_in):
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
            raise CannotSplit("its head needs more than its trunk's output")
        made = mx.concatenate(parts).reshape(own.shape).astype(mx.float32)
        exact = hidden.dtype == mx.float32
        allowed = (1e-4 if exact else 2**-7) * max(1.0, mx.abs(own).max().item())
        off = mx.abs(made - own).max().item()
        self.model.train(training)
        if not off <= allowed:
            raise CannotSplit(f"logits by chunks are off by {off:.2g}")
