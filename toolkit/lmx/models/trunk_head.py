"""A model split into its trunk (embedding, blocks, final norm) and its LM head."""

import mlx.core as mx
import mlx.nn as nn

from ..cpu import multiplies_exactly
from .hooks import ModuleProxy, find_blocks, replace_module


class NoTrunkHeadSplit(Exception):
    """The model's head does not work on chunks of its trunk's output; says why."""


class TrunkHeadSplit:
    """A model split into its trunk and its head, which can run on some tokens only.

    Both are the model's own code: a proxy either captures the trunk's output or
    replaces it. So logit scales and soft-caps are kept.

    Attributes:
        prefix: prefix of the paths of all parameters of the blocks.

    Raises:
        NoTrunkHeadSplit: on random tokens, logits by chunks differ from the model's.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        blocks = find_blocks(model)
        if blocks is None or not blocks.path:
            raise NoTrunkHeadSplit("it has no trunk apart from its head")
        self.prefix = blocks.prefix
        parent, _, self._name = blocks.path.rpartition(".")
        self._owner = dict(model.named_modules())[parent]
        self._trunk = blocks.trunk
        self._verify()

    def hidden(self, inputs: mx.array, **kwargs) -> mx.array:
        """The trunk's output, [B, L, width]."""
        outputs = []

        def call(*args, **kwargs):
            outputs.append(self._trunk(*args, **kwargs))
            return outputs[-1]

        # The graph of the logits is built, but they are never evaluated.
        with replace_module(self._owner, self._name, ModuleProxy(self._trunk, call)):
            self.model(inputs, **kwargs)
        is_one_array = len(outputs) == 1 and isinstance(outputs[0], mx.array)
        if not is_one_array or outputs[0].ndim != 3:
            raise NoTrunkHeadSplit("its trunk does not return one array")
        return outputs[0]

    def logits(self, hidden: mx.array) -> mx.array:
        """The head's output [T, V] for the trunk's output [T, width]."""
        proxy = ModuleProxy(self._trunk, lambda *_, **__: hidden[None])
        with replace_module(self._owner, self._name, proxy):
            return self.model(mx.zeros((1, len(hidden)), mx.int32))[0]

    def _verify(self) -> None:
        training = self.model.training
        self.model.eval()
        # Only the shape is used, so nothing is computed.
        vocab_size = self.model(mx.zeros((1, 1), mx.int32)).shape[-1]
        highest = min(64, vocab_size)
        tokens = mx.random.randint(0, highest, (2, 16), key=mx.random.key(0))
        expected = self.model(tokens).astype(mx.float32)
        hidden = self.hidden(tokens)
        hidden = hidden.reshape(-1, hidden.shape[-1])
        # Chunks that start and end inside a sequence.
        chunks = [self.logits(hidden[start : start + 5]) for start in range(0, 32, 5)]
        if any(chunk.shape[-1:] != expected.shape[-1:] for chunk in chunks):
            raise NoTrunkHeadSplit("its head needs more than its trunk's output")
        logits = mx.concatenate(chunks).reshape(expected.shape).astype(mx.float32)
        is_exact = hidden.dtype == mx.float32 and multiplies_exactly()
        tolerance = 1e-4 if is_exact else 2**-7
        tolerance *= max(1.0, mx.abs(expected).max().item())
        error = mx.abs(logits - expected).max().item()
        self.model.train(training)
        if not error <= tolerance:
            raise NoTrunkHeadSplit(f"logits by chunks are off by {error:.2g}")
