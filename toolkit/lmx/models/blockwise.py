"""Parts of a model, run one by one by its own code: its blocks, its trunk and its head.

Block by block, the weights of one block are in memory at a time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from ..cpu import malloc, multiplies_exactly, on_cpu
from ..errors import UserError
from .hooks import ModuleProxy, find_blocks, replace_module

# Errors of a block that expects to be called in another way.
CALL_ERRORS = (AttributeError, TypeError, KeyError, ValueError)


class BlockwiseModel:
    """A model as a sequence of transformer blocks.

    Args:
        model: its weights may be lazy (not yet read from disk).
        reread: returns the same model with lazy weights. They replace weights that were
            used, so that these are freed. None = weights stay in memory.
        hint: of errors, what to do without the blocks.

    Attributes:
        blocks: the modules of the model.
        prefix: prefix of the names of all block parameters, before the block index.

    Raises:
        UserError: the model has no list of blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        reread: Callable[[], nn.Module] | None = None,
        *,
        hint: str = "method: rtn",
    ):
        blocks = find_blocks(model)
        if blocks is None:
            raise UserError("this model has no list of transformer blocks", hint=hint)
        self.model = model
        self.hint = hint
        self.reread = reread
        self.prefix = blocks.prefix
        self._trunk, self._name = blocks.trunk, blocks.name
        self.blocks: list[nn.Module] = list(blocks.trunk[blocks.name])
        self._lazy_blocks: dict[int, nn.Module] = {}

    def __len__(self) -> int:
        return len(self.blocks)

    def embed(self, tokens: mx.array) -> mx.array:
        """Hidden states [B, L, width] before the first block."""
        return self._block_arguments(0, tokens)[0][0]

    def run_block(self, index: int, tokens: mx.array, hidden: mx.array) -> mx.array:
        """The output of a block for hidden states [B, L, width]."""
        args, kwargs = self._block_arguments(index, tokens)
        return self.blocks[index](hidden, *args[1:], **kwargs)

    def logits(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        """Logits [B, L, vocabulary] from the output of the last block."""
        calls = [lambda *_, **__: hidden]
        calls += [lambda hidden, *_, **__: hidden] * (len(self) - 1)
        with self._replace_calls(calls):
            return self.model(tokens)

    @contextmanager
    def loaded_block(
        self, index: int, dtype: mx.Dtype | None = None
    ) -> Iterator[nn.Module]:
        """A block with its floating-point weights in `dtype`; they are freed on exit.

        Weights that were assigned to the block inside the context are dropped.
        """
        block = self.blocks[index]
        original = None if self.reread else block.parameters()
        if dtype is not None:
            block.update(tree_map(lambda v: cast(v, dtype), block.parameters()))
        try:
            yield block
        finally:
            if original is None:
                if index not in self._lazy_blocks:
                    lazy = find_blocks(self.reread())
                    self._lazy_blocks = dict(enumerate(lazy.trunk[lazy.name]))
                original = self._lazy_blocks.pop(index).parameters()
            block.update(original)
            mx.clear_cache()
            malloc.trim()

    @contextmanager
    def cast_outer_weights(self, dtype: mx.Dtype) -> Iterator[None]:
        """Weights outside the blocks are in `dtype` inside the context.

        Otherwise every call casts them anew, which takes longer than their product.
        """
        outer = {
            name: value
            for name, value in tree_flatten(self.model.parameters())
            if not name.startswith(self.prefix)
        }
        self.model.update(
            tree_unflatten([(name, cast(v, dtype)) for name, v in outer.items()])
        )
        try:
            yield
        finally:
            self.model.update(tree_unflatten(list(outer.items())))

    def unload(self) -> None:
        """Free all weights that were read, including those outside the blocks."""
        if self.reread:
            self.model.update(self.reread().parameters())

    def verify(self, tokens: mx.array) -> None:
        """Compare the logits of the block-by-block run with those of the model.

        Raises:
            UserError: the logits differ, or a block does not run on its own.
        """
        order: list[int] = []
        # MLX's CPU backend multiplies experts in float32 only.
        dtype = mx.float32 if on_cpu() else None
        try:
            hidden = self.embed(tokens)

            def run_both(index: int):
                def call(*args, **kwargs):
                    nonlocal hidden
                    order.append(index)
                    with self.loaded_block(index, dtype) as block:
                        output = block(*args, **kwargs)
                        hidden = self.run_block(index, tokens, hidden)
                        mx.eval(output, hidden)
                    return output

                return call

            with self._replace_calls([run_both(i) for i in range(len(self))]):
                expected = self.model(tokens)
            error = mx.abs(self.logits(tokens, hidden) - expected)
        except CALL_ERRORS as call_error:
            raise self._not_sequential(call_error) from call_error
        if order != list(range(len(self))):
            raise self._not_sequential("they are not called once each, in order")
        if not (error.max() <= 1e-3 * mx.abs(expected).max()).item():
            raise self._not_sequential("the logits differ")

    def _block_arguments(self, index: int, tokens: mx.array) -> tuple[tuple, dict]:
        """The arguments of a block if all blocks before it were the identity."""
        calls: dict[int, tuple] = {}

        def record(index: int):
            def call(*args, **kwargs):
                calls[index] = (args, kwargs)
                return args[0]

            return call

        with self._replace_calls([record(i) for i in range(len(self))]):
            self.model(tokens)
        return calls[index]

    def _replace_calls(self, calls: list[Callable]):
        proxies = [ModuleProxy(*p) for p in zip(self.blocks, calls, strict=True)]
        return replace_module(self._trunk, self._name, proxies)

    def _not_sequential(self, reason) -> UserError:
        return UserError(
            f"the blocks of this model cannot be run one by one: {reason}",
            hint=self.hint,
        )


def cast(value: mx.array, dtype: mx.Dtype) -> mx.array:
    """Cast floating-point values. Codes stay as they are."""
    return value.astype(dtype) if mx.issubdtype(value.dtype, mx.floating) else value


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
