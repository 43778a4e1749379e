"""Estimated work of the sequential pipeline, for its progress and for a dry run.

The unit is one floating-point operation of a large matrix product. Everything else is
expressed in it, with factors measured on two cores. The first blocks show how much they
are off: the time left is extrapolated from the work that is done.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import mlx.nn as nn
from mlx.utils import tree_flatten

from ...config.quant_spec import QuantSpec
from ...models.hooks import find_blocks

# Time of a forward pass through a block relative to its products, with attention,
# norms, activations and disk; and of both passes of a gradient.
FORWARD, BACKWARD = 2.0, 5.0
# The same for a step on logits, relative to the product that gives them.
LOGITS, LOGITS_GRADIENT = 3.0, 6.0
# Second moments relative to the products of all layers; layers may share their input.
MOMENTS = 0.7
# Operations per weight of GPTQ with the evaluation of RTN and of its result, and of a
# refinement.
GPTQ_PASS, REFINEMENT = 3e4, 3e4
# Experts that a token is assumed to use.
ACTIVE_EXPERTS = 8


@dataclass(frozen=True)
class SequentialCost:
    """Work of every phase.

    Attributes:
        block_weights: by block, weights of its matrices that a token is multiplied by.
        solved: by block, weights that are quantized.
        squares: by block, the sum of K * K over its quantized layers.
        head_weights: weights of the output head.
        outer: weights outside the blocks that are quantized.
        tokens: of the calibration.
        fisher_tokens: with a forward and backward pass before the blocks.
        compared_tokens: of the full-precision stream.
        refine_iters: refinements of a grid.
    """

    block_weights: list[float]
    solved: list[int]
    squares: list[int]
    head_weights: int
    outer: int
    tokens: int
    fisher_tokens: int
    compared_tokens: int
    refine_iters: int

    @classmethod
    def of(
        cls,
        model: nn.Module,
        specs: dict[str, QuantSpec],
        *,
        tokens: int,
        fisher_tokens: int,
        compared_tokens: int,
        refine_iters: int,
    ) -> "SequentialCost | None":
        """From the shapes of a model's weights. None if it has no blocks."""
        blocks = find_blocks(model)
        if blocks is None:
            return None
        shapes = {
            name: value.shape
            for name, value in tree_flatten(model.parameters())
            if value.ndim > 1
        }
        count = len(blocks.trunk[blocks.name])
        weights, solved, squares = [0.0] * count, [0] * count, [0] * count
        outer, matrices = 0, {}
        for name, shape in shapes.items():
            path = name.removesuffix(".weight")
            is_quantized = path in specs
            if not name.startswith(blocks.prefix):
                matrices[path] = prod(shape)
                outer += is_quantized * prod(shape)
                continue
            index = int(name.removeprefix(blocks.prefix).partition(".")[0])
            experts = shape[0] if len(shape) == 3 else 1
            weights[index] += prod(shape) * min(1.0, ACTIVE_EXPERTS / experts)
            solved[index] += is_quantized * prod(shape)
            squares[index] += is_quantized * shape[-1] ** 2
        head = max(matrices.values(), default=0)
        return cls(
            *(weights, solved, squares, head, outer),
            *(tokens, fisher_tokens, compared_tokens, refine_iters),
        )

    def forward(self, block: int, tokens: int) -> float:
        """Tokens through one block."""
        return FORWARD * 2 * self.block_weights[block] * tokens

    def backward(self, block: int, tokens: int) -> float:
        """Tokens through one block with the gradients of its layers."""
        return BACKWARD * 2 * self.block_weights[block] * tokens

    def logits(self, tokens: int, *, gradient: bool) -> float:
        """Logits of tokens and what follows from them."""
        factor = LOGITS_GRADIENT if gradient else LOGITS
        return factor * 2 * self.head_weights * tokens

    def solve(self, weights: int) -> float:
        """GPTQ of some weights, with its refinements."""
        return (GPTQ_PASS + REFINEMENT * self.refine_iters) * weights

    def moments(self, block: int, tokens: int) -> float:
        """Second moments of the inputs of a block's layers."""
        return MOMENTS * 2 * self.squares[block] * tokens

    def block(self, index: int) -> float:
        """Everything for one block."""
        tokens = self.tokens + self.compared_tokens
        passes, moments = self.forward(index, tokens), self.moments(index, tokens)
        return passes + moments + self.solve(self.solved[index])

    @property
    def before_blocks(self) -> float:
        """The Fisher information and the embeddings."""
        tokens = self.fisher_tokens
        passes = sum(
            self.forward(index, tokens) + self.backward(index, tokens)
            for index in range(len(self.block_weights))
        )
        logits = self.logits(tokens, gradient=True) + self.logits(
            tokens, gradient=False
        )
        return passes + logits * bool(tokens) + self.solve(self.outer)

    @property
    def total(self) -> float:
        """The whole pipeline."""
        blocks = range(len(self.block_weights))
        return self.before_blocks + sum(map(self.block, blocks))


class CostMeter:
    """Advances a progress bar as work is done.

    Args:
        cost: None = the bar does not move.
        advance: gets an amount of work, and what comes next.
    """

    def __init__(
        self,
        cost: SequentialCost | None = None,
        advance: Callable[[float, str | None], None] | None = None,
    ):
        self._cost = cost
        self._advance = advance

    def start(self, note: str) -> None:
        """Say what is being done."""
        self._add(lambda _: 0.0, note)

    def forward(self, block: int, tokens: int) -> None:
        """Tokens went through a block."""
        self._add(lambda cost: cost.forward(block, tokens))

    def backward(self, block: int, tokens: int) -> None:
        """Gradients went back through a block."""
        self._add(lambda cost: cost.backward(block, tokens))

    def logits(self, tokens: int, *, gradient: bool) -> None:
        """Logits of tokens were used."""
        self._add(lambda cost: cost.logits(tokens, gradient=gradient))

    def moments(self, block: int, share: float) -> None:
        """A share of a block's second moments was computed."""
        self._add(
            lambda cost: share * cost.moments(block, cost.tokens + cost.compared_tokens)
        )

    def solve(self, weights: int) -> None:
        """Weights were quantized."""
        self._add(lambda cost: cost.solve(weights))

    def skip_blocks(self, count: int) -> None:
        """An earlier run did the work up to this block."""
        self._add(lambda c: c.before_blocks + sum(map(c.block, range(count))))

    def _add(
        self, amount: Callable[[SequentialCost], float], note: str | None = None
    ) -> None:
        if self._cost and self._advance:
            self._advance(amount(self._cost), note)
