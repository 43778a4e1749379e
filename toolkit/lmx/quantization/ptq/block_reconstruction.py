"""Block reconstruction: train each quantized block towards its full-precision output.

Codes, scales and biases of one block at a time are trained with a straight-through
estimator, from the values that the method left (Block-AP of EfficientQAT, arXiv
2407.11062). The input is that of the quantized model. Latent codes move in steps of
their grid, scales and biases in the mean scale of their layer. So one learning rate has
the same meaning for all layers and bit widths.
"""

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
from ..packing import dequantize, pack_codes
from .activation_cache import ActivationShard
from .base import PTQContext, QuantizedBlock, QuantizedTensor

# Latent codes beyond the grid by more than this, half a step, have no gradient.
MARGIN = 0.5
WARMUP_RATIO, MIN_LR_RATIO = 0.05, 0.05
BETAS = [0.9, 0.99]
EVALUATIONS = 4
# One in this many shards of the tokens is held out.
HELD_OUT_INTERVAL = 8


@dataclass(frozen=True)
class LatentCodes:
    """Weights as scale * round(latent code) + bias, trainable in all three.

    A dequantized weight carries no gradient for its grid point: with its own value, it
    has no error. So latent codes, scales and biases are trained instead of weights.

    Latent codes are float32 [..., K]; scales and biases [M], of the M groups in order.

    Attributes:
        dtype: dtype that scales and biases are stored in and weights computed in.
    """

    spec: QuantSpec
    dtype: mx.Dtype

    @property
    def max_code(self) -> int:
        return 2**self.spec.bits - 1

    def init(self, packed: dict[str, mx.array]) -> mx.array:
        """Latent codes with the values of the stored codes."""
        shape = packed["scales"].shape
        unit = {"scales": mx.ones(shape), "biases": mx.zeros(shape)}
        return dequantize({"weight": packed["weight"]} | unit, self.spec, mx.float32)

    def packed(self, latents, scales, biases) -> dict[str, mx.array]:
        """The tensors that a checkpoint stores."""
        shape = (*latents.shape[:-1], -1)
        return {
            "weight": pack_codes(self._codes(latents), self.spec.bits),
            "scales": scales.astype(self.dtype).reshape(shape),
            "biases": biases.astype(self.dtype).reshape(shape),
        }

    def weight(self, latents, scales, biases) -> mx.array:
        """The dequantized weights, float32 [..., K].

        With a gradient g of the weights, latent codes get g * scale, or 0 if they are
        more than `MARGIN` beyond the grid; scales get the sum of g * code over their
        group, biases the sum of g.
        """

        @mx.custom_function
        def forward(latents, scales, biases):
            packed = self.packed(latents, scales, biases)
            return dequantize(packed, self.spec, self.dtype).astype(mx.float32)

        @forward.vjp
        def _(primals, cotangent, _):
            latents, scales, _ = primals
            g = cotangent.reshape(-1, self.spec.group_size)
            codes = self._codes(latents).reshape(g.shape)
            in_range = (latents >= -MARGIN) & (latents <= self.max_code + MARGIN)
            gradients = (g * scales[:, None]).reshape(latents.shape)
            by_latent = mx.where(in_range, gradients, 0.0)
            return by_latent, (g * codes).sum(axis=-1), g.sum(axis=-1)

        return forward(latents, scales, biases)

    def _codes(self, latents: mx.array) -> mx.array:
        return mx.clip(mx.round(latents), 0, self.max_code)


class BlockReconstruction:
    """Trains one block after the other and logs the result."""

    def __init__(self, config: BlockReconstructionConfig, context: PTQContext):
        self.config = config
        self.context = context
        self.num_blocks = self.num_improved = 0

    def improve(self, block: QuantizedBlock) -> dict[str, QuantizedTensor]:
        """Train a block; its layers by path if they are better on held-out tokens."""
        specs = {
            path: spec
            for path, spec in self.context.specs.items()
            if f"{path}.biases" in block.tensors
        }
        if not specs or len(block.shards) < 2:
            return {}
        trainer = _BlockTrainer(self.config, block, specs, self.context.dtype)
        with _translate_errors(block.prefix), _restored(block.block):
            tensors, before, after = trainer.run()
        is_better = after < before
        self.num_blocks += 1
        self.num_improved += is_better
        self.context.logger.info(
            f"{block.prefix.rstrip('.')}: block reconstruction, relative output error "
            f"on held-out tokens {before:.3g} -> {after:.3g}"
            + ("" if is_better else ": rejected")
        )
        if not is_better:
            return {}
        return {
            path: self.context.quantized_tensor(path, tensors[path]) for path in specs
        }

    def log_summary(self) -> None:
        self.context.logger.info(
            f"block reconstruction improved {self.num_improved} of {self.num_blocks} "
            "blocks"
            if self.num_blocks
            else "block reconstruction skipped: it needs at least two shards of tokens"
        )


class _BlockTrainer:
    """Trains the changes of one block's latent codes, scales and biases."""

    def __init__(
        self,
        config: BlockReconstructionConfig,
        block: QuantizedBlock,
        specs: dict[str, QuantSpec],
        dtype: mx.Dtype,
    ):
        self.config, self.block = config, block
        num_held_out = max(1, len(block.shards) // HELD_OUT_INTERVAL)
        self._train_shards = block.shards[:-num_held_out]
        self._held_out = block.shards[-num_held_out:]
        self._grids = {p: LatentCodes(spec, dtype) for p, spec in specs.items()}
        self._initial, self._units = {}, {}
        for path, grid in self._grids.items():
            names = ("weight", "scales", "biases")
            packed = {name: block.tensors[f"{path}.{name}"] for name in names}
            self._initial[path] = {"latents": grid.init(packed)} | {
                name: packed[name].astype(mx.float32).reshape(-1) for name in names[1:]
            }
            # A vector, because MLX compiles a scalar constant into the kernel.
            scales = self._initial[path]["scales"]
            self._units[path] = mx.full_like(scales, mx.abs(scales).mean())
        self._changes = {
            f"{path}.{kind}": mx.zeros_like(value)
            for path, initial in self._initial.items()
            for kind, value in initial.items()
        }
        self._optimizer = optimizers.Adam(0.0, BETAS, bias_correction=True)
        self._optimizer.init(self._changes)
        state = [self._changes, self._optimizer.state]
        self._compiled_step = mx.compile(self._step, inputs=state, outputs=state)
        mx.eval(self._initial, self._units, state)

    def run(self) -> tuple[dict, float, float]:
        """The best stored tensors, and the errors of the start and of them."""
        before = best_error = self._error()
        best, steps = self._packed(), self.config.steps
        interval = max(1, steps // EVALUATIONS)
        for step in range(steps):
            learning_rate = learning_rate_at(
                step,
                steps,
                peak=self.config.learning_rate,
                schedule="cosine",
                warmup_ratio=WARMUP_RATIO,
                min_lr_ratio=MIN_LR_RATIO,
            )
            shard, rate = self._shard(step), mx.array(learning_rate)
            mx.eval(self._compiled_step(shard.tokens, *shard.states(), rate))
            if (step + 1) % interval == 0 or step + 1 == steps:
                error = self._error()
                if error < best_error:
                    best, best_error = self._packed(), error
        return best, before, best_error

    def _shard(self, step: int) -> ActivationShard:
        """The shard of a step. Every epoch has its own order."""
        count = len(self._train_shards)
        epoch, place = divmod(step, count)
        order = random.Random(epoch).sample(range(count), count)
        return self._train_shards[order[place]]

    def _step(self, tokens, hidden, target, learning_rate) -> mx.array:
        def loss_of(changes):
            output = self._output(changes, tokens, hidden)
            error = output - target.astype(mx.float32)
            return mx.square(error).mean() / mx.square(target.astype(mx.float32)).mean()

        loss, gradients = mx.value_and_grad(loss_of)(self._changes)
        self._optimizer.learning_rate = learning_rate
        changes = self._optimizer.apply_gradients(gradients, self._changes)
        multiplier = self.config.scale_lr_multiplier
        for name, old in self._changes.items():
            if not name.endswith(".latents"):
                changes[name] = old + multiplier * (changes[name] - old)
        self._changes.update(changes)
        return loss

    def _output(self, changes: dict, tokens: mx.array, hidden: mx.array) -> mx.array:
        """The output of the block with its weights quantized, float32."""
        weights = {}
        for path, grid in self._grids.items():
            weight = grid.weight(**self._values(path, changes))
            name = path.removeprefix(self.block.prefix)
            weights[f"{name}.weight"] = weight.astype(hidden.dtype)
        self.block.block.update(tree_unflatten(list(weights.items())))
        return self.block.run(tokens, hidden).astype(mx.float32)

    def _error(self) -> float:
        """Squared error of the output on held-out tokens, relative to the target."""
        error = norm = 0.0
        for shard in self._held_out:
            hidden, target = shard.states()
            target = target.astype(mx.float32)
            output = self._output(self._changes, shard.tokens, hidden)
            error += mx.square(output - target).sum().item()
            norm += mx.square(target).sum().item()
        return error / norm

    def _values(self, path: str, changes: dict[str, mx.array]) -> dict[str, mx.array]:
        initial, unit = self._initial[path], self._units[path]
        change = {kind: changes[f"{path}.{kind}"] for kind in initial}
        # A scale moves about the middle of the codes, by what the outer codes move.
        middle = self._grids[path].max_code / 2
        spread = unit * change["scales"] / middle
        return {
            "latents": initial["latents"] + change["latents"],
            "scales": initial["scales"] + spread,
            "biases": initial["biases"] + unit * change["biases"] - middle * spread,
        }

    def _packed(self) -> dict[str, dict[str, mx.array]]:
        packed = {
            path: grid.packed(**self._values(path, self._changes))
            for path, grid in self._grids.items()
        }
        mx.eval(packed)
        return packed


@contextmanager
def _restored(block: nn.Module) -> Iterator[None]:
    """Restore the weights of a block on exit."""
    original = block.parameters()
    try:
        yield
    finally:
        block.update(original)


@contextmanager
def _translate_errors(prefix: str) -> Iterator[None]:
    """Report an error in a traced function as one of the model's architecture."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"{prefix.rstrip('.')} cannot be trained: {str(error).splitlines()[0]}",
            hint="remove block_reconstruction: this architecture has no gradient",
        ) from error
