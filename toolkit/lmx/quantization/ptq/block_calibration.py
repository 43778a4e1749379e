"""Calibration statistics of the layers of one block, and of the layers after the last.

Every process runs its own shards of the tokens; the statistics are sums over all.

The inputs of quantized layers stay on disk until the block is done. A later pass starts
from them: MLX does not compute what is not used, so each layer of the quantized stream
runs only about once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ...files.atomic import require_space
from ...interfaces import SINGLE_PROCESS, Communicator
from ...models.blockwise import BlockwiseModel
from ...models.hooks import (
    CapturedInputs,
    capture_inputs,
    override_inputs,
    override_outputs,
    tokens_of_experts,
)
from ..target_layers import has_known_inputs
from . import activation_cache
from .activation_cache import FULL, INPUTS, QUANTIZED
from .input_statistics import CalibrationShard, InputStatistics

FULL_INPUTS = f"{INPUTS}-{FULL}"
RESIDUAL = ".residual"
# Largest relative error of a sum in the residual stream, given low precision.
RESIDUAL_TOLERANCE = 0.02


class BlockCalibration:
    """One block with its weights loaded, between the hidden states around it.

    Args:
        paths: paths in the block of the layers to quantize. Those whose inputs do not
            tell the cost of their errors are in no group.
        tokens: int32 [B, L] by shard.
        before, after: folders of the hidden states around the block.
        num_compared: number of shards, the first ones, with a full-precision stream.
        ranks: the processes that share the shards.

    Attributes:
        groups: paths of layers that share their input, in the order of their calls.

    Raises:
        UserError: the disk has too little space.
    """

    def __init__(
        self,
        blockwise: BlockwiseModel,
        index: int,
        paths: list[str],
        tokens: list[mx.array],
        before: Path,
        after: Path,
        *,
        num_compared: int,
        ranks: Communicator = SINGLE_PROCESS,
    ):
        self.blockwise = blockwise
        self.index = index
        self.ranks = ranks
        self.tokens = tokens
        self.before = before
        self.after = after
        self.num_compared = num_compared
        modules = dict(self._block.named_modules())
        hidden = self._one_window()
        known = [path for path in paths if has_known_inputs(modules[path])]
        with capture_inputs(self._block, known) as captured:
            self.blockwise.run_block(index, tokens[0][:1], hidden)
        self.groups = captured.groups()
        self._called_again = captured.called_again
        self._cached: list[list[str]] = []
        self._residual_writers = [
            group[0]
            for group in self.groups
            if num_compared and self._adds_to_residual(group)
        ]
        if ranks.is_first:
            inputs = {id(value): value.nbytes for value in captured.objects.values()}
            sizes = [shard.size / hidden.shape[1] for shard in tokens]
            per_window = hidden.nbytes + sum(inputs.values())
            compared = per_window + hidden.nbytes * len(self._residual_writers)
            size = sum(sizes) * per_window + sum(sizes[:num_compared]) * compared
            require_space(after.parent, ceil(size))

    def run_full_precision(self) -> None:
        """Run the full-precision stream and cache the inputs of the layers.

        Inputs of a mixture's experts are not compared and not cached.
        """
        paths = [g[0] for g in self.groups if self._num_experts(g[0]) is None]
        for shard in self.ranks.shard(range(self.num_compared)):
            with capture_inputs(self._block, paths) as captured:
                outputs = self._run(shard, FULL)
            activation_cache.save(self.after, FULL, shard, {"hidden": outputs})
            inputs = dict(captured.rows)
            known = self._reusable(captured.objects)
            for path in self._residual_writers:
                with self._block_until(path), override_inputs(self._block, known):
                    inputs[f"{path}{RESIDUAL}"] = self._run(shard, FULL)
            activation_cache.save(self.after, FULL_INPUTS, shard, inputs)

    def statistics(
        self, group: list[str], weights: list[mx.array] | None = None
    ) -> InputStatistics:
        """Statistics of the input of a group. Earlier groups are quantized already.

        Args:
            weights: token weights, float32 [B * L] by shard. None = all 1. For a
                mixture of experts, tokens of weight 0 are left out and all others
                count alike.
        """
        path = group[0]
        modules = dict(self._block.named_modules())
        width, experts = modules[path].weight.shape[-1], self._num_experts(path)
        num_compared = self.num_compared if experts is None else 0
        writes_residual = num_compared and path in self._residual_writers
        statistics = InputStatistics.empty(
            width,
            experts=experts,
            with_cross=num_compared > 0,
            residual_width=len(modules[path].weight) if writes_residual else None,
            ranks=self.ranks,
        )
        if num_compared:
            prefix = f"{self.blockwise.prefix}{self.index}."
            dense = {f"{prefix}{name}": modules[name].weight for name in group}
            compared = _num_before(self.tokens, num_compared)
            shards = self._compare(group, weights)
            statistics.add_compared(shards, compared, dense)
        if num_compared < len(self.tokens):
            with statistics.summed():
                for shard in _own_from(num_compared, self.tokens, self.ranks):
                    token_weights = weights and weights[shard]
                    if experts is None:
                        rows = self._capture(path, shard).rows[path]
                        statistics.add_inputs(rows, weights=token_weights)
                        continue
                    with tokens_of_experts(self._block, [path]) as tokens:
                        captured = self._capture(path, shard)
                    visible = weights and (token_weights > 0)[tokens(path, captured)]
                    rows = captured.rows[path]
                    statistics.add_routed(rows, captured.experts[path], visible)
        self._cached.append(group)
        return statistics

    def _capture(self, path: str, shard: int) -> CapturedInputs:
        """Capture and cache the input of a layer in the quantized stream."""
        with capture_inputs(self._block, [path]) as captured:
            self._run_quantized(shard)
        inputs = {"x": captured.objects[path]}
        activation_cache.save(self.after, f"{INPUTS}-{path}", shard, inputs)
        return captured

    def _compare(
        self, group: list[str], weights: list[mx.array] | None
    ) -> Iterator[CalibrationShard]:
        path = group[0]
        for shard in self.ranks.shard(range(self.num_compared)):
            captured = self._capture(path, shard)
            token_weights = weights and weights[shard]
            full, errors = activation_cache.load(self.after, FULL_INPUTS, shard), None
            if path in self._residual_writers:
                with self._block_until(path):
                    residual = self._run_quantized(shard)
                errors = full[f"{path}{RESIDUAL}"] - residual.astype(mx.float32)
                errors = errors.reshape(-1, errors.shape[-1])
            rows, size = captured.rows[path], self.tokens[shard].size
            # Of a layer that is called twice, a token has two inputs.
            start = _num_before(self.tokens, shard) * (len(rows) // size)
            yield CalibrationShard(start, rows, full[path], errors, token_weights)

    def run_quantized(self) -> None:
        """Run the quantized stream to the end of the block."""
        for shard in _own_from(0, self.tokens, self.ranks):
            hidden = {"hidden": self._run_quantized(shard)}
            activation_cache.save(self.after, QUANTIZED, shard, hidden)
            activation_cache.drop(self.after, INPUTS, shard)

    @property
    def _block(self) -> nn.Module:
        return self.blockwise.blocks[self.index]

    def _num_experts(self, path: str) -> int | None:
        shape = dict(self._block.named_modules())[path].weight.shape
        return shape[0] if len(shape) == 3 else None

    def _adds_to_residual(self, group: list[str]) -> bool:
        """Whether the output of a layer is added to the residual stream unchanged."""
        path, hidden = group[0], self._one_window()
        weight = dict(self._block.named_modules())[path].weight
        if len(group) > 1 or path in self._called_again or weight.ndim > 2:
            return False
        if len(weight) != hidden.shape[-1]:
            return False
        # As large as the residual stream, so that half precision can hold the sum.
        noise = mx.random.uniform(-1, 1, hidden.shape, key=mx.random.key(0))
        shift = (noise * mx.abs(hidden).max()).astype(hidden.dtype)
        outputs = []
        for value in (mx.zeros_like(shift), shift):
            with self._block_until(path, value):
                output = self.blockwise.run_block(
                    self.index, self.tokens[0][:1], hidden
                )
            outputs.append(output.astype(mx.float32))
        # Half precision cannot hold the norm of many values.
        shift = shift.astype(mx.float32)
        error = mx.linalg.norm(outputs[1] - outputs[0] - shift)
        return (error < RESIDUAL_TOLERANCE * mx.linalg.norm(shift)).item()

    @contextmanager
    def _block_until(self, path: str, output: mx.array | float = 0) -> Iterator[None]:
        """Replace the output of a layer; later layers of the block give zeros."""
        order = [name for group in self.groups for name in group]
        later = order[order.index(path) + 1 :]
        with (
            override_outputs(self._block, later, mx.zeros_like),
            override_outputs(self._block, [path], lambda y: mx.zeros_like(y) + output),
        ):
            yield

    def _reusable(self, inputs: dict[str, mx.array]) -> dict[str, mx.array]:
        """Inputs of layers that are called once."""
        return {p: x for p, x in inputs.items() if p not in self._called_again}

    def _one_window(self) -> mx.array:
        return activation_cache.load(self.before, QUANTIZED, 0)["hidden"][:1]

    def _run(self, shard: int, stream: str) -> mx.array:
        hidden = activation_cache.load(self.before, stream, shard)["hidden"]
        return self.blockwise.run_block(self.index, self.tokens[shard], hidden)

    def _run_quantized(self, shard: int) -> mx.array:
        """Run the quantized stream from the cached inputs."""
        inputs = {}
        for group in self._cached:
            stream = f"{INPUTS}-{group[0]}"
            x = activation_cache.load(self.after, stream, shard)["x"]
            inputs |= self._reusable(dict.fromkeys(group, x))
        with override_inputs(self._block, inputs):
            return self._run(shard, QUANTIZED)


class HeadCalibration:
    """Statistics of layers after the last block, such as an output head.

    Args:
        paths: paths of the layers outside the blocks.
        tokens: int32 [B, L] by shard.
        counted: bool [B, L] by shard, the positions that the statistics sum over.
        folder: of the hidden states after the last block.
        num_compared: number of shards, the first ones, with a full-precision stream.
        ranks: the processes that share the shards.
    """

    def __init__(
        self,
        blockwise: BlockwiseModel,
        paths: list[str],
        tokens: list[mx.array],
        counted: list[mx.array],
        folder: Path,
        *,
        num_compared: int,
        ranks: Communicator = SINGLE_PROCESS,
    ):
        self.blockwise = blockwise
        self.ranks = ranks
        self.paths = paths
        self.tokens = tokens
        self.counted = counted
        self.folder = folder
        self.num_compared = num_compared

    def groups(self) -> list[list[str]]:
        """Paths of layers that share their input. Others receive no hidden states."""
        hidden = self._hidden(QUANTIZED, 0)[:1]
        return self._capture(self.paths, self.tokens[0][:1], hidden).groups()

    def statistics(self, group: list[str]) -> InputStatistics:
        """Statistics of the input of a group."""
        modules = dict(self.blockwise.model.named_modules())
        weights, path = {p: modules[p].weight for p in group}, group[0]
        width = weights[path].shape[-1]
        statistics = InputStatistics.empty(
            width,
            experts=None,
            with_cross=self.num_compared > 0,
            ranks=self.ranks,
        )
        if self.num_compared:
            compared = _num_before(self.tokens, self.num_compared)
            shards = self._compare(path)
            statistics.add_compared(shards, compared, weights)
        if self.num_compared < len(self.tokens):
            with statistics.summed():
                for shard in _own_from(self.num_compared, self.tokens, self.ranks):
                    (x,), counted = self._inputs(path, shard, [QUANTIZED])
                    statistics.add_inputs(x, weights=counted)
        return statistics

    def _compare(self, path: str) -> Iterator[CalibrationShard]:
        for shard in self.ranks.shard(range(self.num_compared)):
            (x, y), counted = self._inputs(path, shard, [QUANTIZED, FULL])
            start = _num_before(self.tokens, shard)
            yield CalibrationShard(start, x, y, None, counted)

    def _inputs(
        self, path: str, shard: int, streams: list[str]
    ) -> tuple[list[mx.array], mx.array]:
        """Inputs of a layer in these streams, and the weights of the positions."""
        tokens = self.tokens[shard]
        hidden = [self._hidden(stream, shard) for stream in streams]
        rows = [self._capture([path], tokens, h).rows[path] for h in hidden]
        return rows, self.counted[shard].reshape(-1).astype(mx.float32)

    def _hidden(self, stream: str, shard: int) -> mx.array:
        return activation_cache.load(self.folder, stream, shard)["hidden"]

    def _capture(
        self, paths: list[str], tokens: mx.array, hidden: mx.array
    ) -> CapturedInputs:
        with capture_inputs(self.blockwise.model, paths) as captured:
            self.blockwise.logits(tokens, hidden)
        return captured


def _num_before(tokens: list[mx.array], shard: int) -> int:
    """Number of tokens in the shards before this one."""
    return sum(part.size for part in tokens[:shard])


def _own_from(first: int, tokens: list[mx.array], ranks: Communicator) -> list[int]:
    """Numbers of the shards of this process, from this one on."""
    return [shard for shard in ranks.shard(range(len(tokens))) if shard >= first]
