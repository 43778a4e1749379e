"""Codes that can move, on a grid that can move under them."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
from mlx.utils import tree_unflatten

from ...config.quant_spec import QuantSpec
from ...config.quantize import BlockReconstructionConfig
from ...errors import UserError
from ...training.schedules import learning_rate_at
from ..packing import expand, pack_codes
from .base import PTQContext
from .block_context import ActivationShard, QuantizedBlock
from .sequential import QuantizedTensor, quantized_tensor

# Steps beyond the outermost points where a weight still has a slope: their cell.
MARGIN = 0.5


@dataclass(frozen=True)
class LatentCodes:
    """Weights scale * round(position) + bias, positions being where codes would be.

    A weight that is on a point does not tell where the point should go, for with its
    own value it says that nothing is wrong; its code does. So positions, scales and
    biases are what is trained of a model in codes, in place of weights and a grid.

    Positions are float32 [..., K]; scales and biases [M], of the M groups in order.

    Attributes:
        dtype: the type scales and biases are stored in, and points are computed in.
    """

    spec: QuantSpec
    dtype: mx.Dtype

    @property
    def top(self) -> int:
        """The last code."""
        return 2**self.spec.bits - 1

    def start(self, packed: dict[str, mx.array]) -> mx.array:
        """The codes that a checkpoint stores."""
        shape = packed["scales"].shape
        plain = {"scales": mx.ones(shape), "biases": mx.zeros(shape)}
        return expand({"weight": packed["weight"]} | plain, self.spec, mx.float32)

    def packed(self, positions, scales, biases) -> dict[str, mx.array]:
        """What a checkpoint stores of them."""
        shape = (*positions.shape[:-1], -1)
        pair = (v.astype(self.dtype).reshape(shape) for v in (scales, biases))
        codes = pack_codes(self._codes(positions), self.spec.bits)
        return dict(zip(("weight", "scales", "biases"), (codes, *pair), strict=True))

    def rounded(self, positions, scales, biases) -> mx.array:
        """The weights as served, float32 [..., K].

        With a slope g by them: positions have g scale, and none once they are more than
        half a step beyond the points; scales have the sum of g code, biases that of g.
        """

        @mx.custom_function
        def forward(positions, scales, biases):
            packed = self.packed(positions, scales, biases)
            return expand(packed, self.spec, self.dtype).astype(mx.float32)

        @forward.vjp
        def _(primals, cotangent, _):
            positions, scales, _ = primals
            g = cotangent.reshape(-1, self.spec.group_size)
            codes = self._codes(positions).reshape(g.shape)
            has_slope = (positions >= -MARGIN) & (positions <= self.top + MARGIN)
            slopes = (g * scales[:, None]).reshape(positions.shape)
            by_position = mx.where(has_slope, slopes, 0.0)
            return by_position, (g * codes).sum(axis=-1), g.sum(axis=-1)

        return forward(positions, scales, biases)

    def _codes(self, positions: mx.array) -> mx.array:
        return mx.clip(mx.round(positions), 0, self.top)


# --- from quant.block_training: Blocks trained, once they are quantized, to make what they made in full precision.
#
# Codes, scales and biases of one block at a time, straight through the rounding, from the
# hidden states of the quantized model towards those of the full one (Block-AP of
# EfficientQAT, arXiv 2407.11062). They begin as the method left them. Weights move in
# steps of their grid and grids in mean steps of their layer, which makes one learning
# rate mean the same for all layers and widths of codes; a scale moves about the middle of
# its codes.


WARMUP, FINAL = 0.05, 0.05
BETAS = [0.9, 0.99]
EVALUATIONS = 4
# Of so many parts of the tokens, one judges.
HELD_OUT = 8


class BlockReconstruction:
    """Trains one block after the other, and tells what came of it."""

    def __init__(self, config: BlockReconstructionConfig, task: PTQContext):
        self.config = config
        self.task = task
        self.blocks = self.better = 0

    def __call__(self, closed: QuantizedBlock) -> dict[str, QuantizedTensor]:
        """Layers by path as they are stored, where they are better; else none."""
        specs = {
            path: spec
            for path, spec in self.task.specs.items()
            if f"{path}.biases" in closed.tensors
        }
        if not specs or len(closed.passages) < 2:
            return {}
        training = _BlockTrainer(self.config, closed, specs, self.task.dtype)
        with _explained(closed.prefix), _restored(closed.block):
            tensors, before, after = training.run()
        is_better = after < before
        self.blocks += 1
        self.better += is_better
        self.task.logger.info(
            f"{closed.prefix.rstrip('.')}: trained, it loses {after:.3g} of its output "
            f"on tokens held out, {before:.3g} before"
            + ("" if is_better else ": undone")
        )
        if not is_better:
            return {}
        return {
            path: quantized_tensor(tensors[path], spec, self.task.dtype)
            for path, spec in specs.items()
        }

    def sum_up(self) -> None:
        """One line for all blocks."""
        self.task.logger.info(
            f"training helped in {self.better} of {self.blocks} blocks"
            if self.blocks
            else "no block was trained: they are of two parts of the tokens or more"
        )


class _BlockTrainer:
    """One block, and how far its weights, scales and biases have moved."""

    def __init__(
        self,
        config: BlockReconstructionConfig,
        closed: QuantizedBlock,
        specs: dict[str, QuantSpec],
        dtype: mx.Dtype,
    ):
        self.config, self.closed = config, closed
        held = max(1, len(closed.passages) // HELD_OUT)
        self._seen, self._held = closed.passages[:-held], closed.passages[-held:]
        self._grids = {p: LatentCodes(spec, dtype) for p, spec in specs.items()}
        self._start, self._units = {}, {}
        for path, grid in self._grids.items():
            names = ("weight", "scales", "biases")
            found = {name: closed.tensors[f"{path}.{name}"] for name in names}
            self._start[path] = {"positions": grid.start(found)} | {
                name: found[name].astype(mx.float32).reshape(-1) for name in names[1:]
            }
            # Whole vectors: a lone number would be built into kernels of its own.
            scales = self._start[path]["scales"]
            self._units[path] = mx.full_like(scales, mx.abs(scales).mean())
        self._moved = {
            f"{path}.{kind}": mx.zeros_like(value)
            for path, start in self._start.items()
            for kind, value in start.items()
        }
        self._optimizer = optimizers.Adam(0.0, BETAS, bias_correction=True)
        self._optimizer.init(self._moved)
        state = [self._moved, self._optimizer.state]
        self._compiled = mx.compile(self._step, inputs=state, outputs=state)
        mx.eval(self._start, self._units, state)

    def run(self) -> tuple[dict, float, float]:
        """What is stored at the best moment, and the errors of the start and of it."""
        before = least = self._error()
        best, steps = self._stored(), self.config.steps
        every = max(1, steps // EVALUATIONS)
        for step in range(steps):
            rate = learning_rate_at(
                step,
                steps,
                peak=self.config.learning_rate,
                schedule="cosine",
                warmup_ratio=WARMUP,
                min_lr_ratio=FINAL,
            )
            passage = self._passage(step)
            mx.eval(self._compiled(passage.tokens, *passage.states(), mx.array(rate)))
            if (step + 1) % every == 0 or step + 1 == steps:
                error = self._error()
                if error < least:
                    best, least = self._stored(), error
        return best, before, least

    def _passage(self, step: int) -> ActivationShard:
        """The part a step trains on; every turn through all has its own order."""
        turn, place = divmod(step, len(self._seen))
        count = len(self._seen)
        order = random.Random(turn).sample(range(count), count)
        return self._seen[order[place]]

    def _step(self, tokens, hidden, wanted, rate) -> mx.array:
        def loss_of(moved):
            off = self._outputs(moved, tokens, hidden) - wanted.astype(mx.float32)
            return mx.square(off).mean() / mx.square(wanted.astype(mx.float32)).mean()

        loss, gradients = mx.value_and_grad(loss_of)(self._moved)
        self._optimizer.learning_rate = rate
        moved = self._optimizer.apply_gradients(gradients, self._moved)
        for name, old in self._moved.items():
            if not name.endswith(".positions"):
                moved[name] = old + self.config.scale_lr_multiplier * (
                    moved[name] - old
                )
        self._moved.update(moved)
        return loss

    def _outputs(self, moved: dict, tokens: mx.array, hidden: mx.array) -> mx.array:
        """What the block makes with its weights rounded, float32."""
        weights = {}
        for path, grid in self._grids.items():
            rounded = grid.rounded(**self._now(path, moved))
            name = path.removeprefix(self.closed.prefix)
            weights[f"{name}.weight"] = rounded.astype(hidden.dtype)
        self.closed.block.update(tree_unflatten(list(weights.items())))
        return self.closed.run(tokens, hidden).astype(mx.float32)

    def _error(self) -> float:
        """Squared error on the tokens held out, as a share of what was wanted."""
        off = power = 0.0
        for passage in self._held:
            hidden, wanted = passage.states()
            wanted = wanted.astype(mx.float32)
            outputs = self._outputs(self._moved, passage.tokens, hidden)
            off += mx.square(outputs - wanted).sum().item()
            power += mx.square(wanted).sum().item()
        return off / power

    def _now(self, path: str, moved: dict[str, mx.array]) -> dict[str, mx.array]:
        start, unit = self._start[path], self._units[path]
        own = {kind: moved[f"{path}.{kind}"] for kind in start}
        # As far as the outermost points move by it.
        middle = self._grids[path].top / 2
        spread = unit * own["scales"] / middle
        return {
            "positions": start["positions"] + own["positions"],
            "scales": start["scales"] + spread,
            "biases": start["biases"] + unit * own["biases"] - middle * spread,
        }

    def _stored(self) -> dict[str, dict[str, mx.array]]:
        found = {
            path: grid.packed(**self._now(path, self._moved))
            for path, grid in self._grids.items()
        }
        mx.eval(found)
        return found


@contextmanager
def _restored(block: nn.Module) -> Iterator[None]:
    """Leave a block with the weights it has."""
    before = block.parameters()
    try:
        yield
    finally:
        block.update(before)


@contextmanager
def _explained(prefix: str) -> Iterator[None]:
    """What goes wrong in a trace is the fault of the model's code."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"{prefix.rstrip('.')} cannot be trained: {str(error).splitlines()[0]}",
            hint="leave `blocks` out: this architecture's code has no gradient",
        ) from error
