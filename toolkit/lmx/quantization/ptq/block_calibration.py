"""The calibration tokens' way through one block, as its layers are quantized.

What goes into a layer is kept on disk until the block is done: a later pass begins
there, for MLX computes nothing whose result is not used, and so no layer of the
quantized stream multiplies much more than once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path

import mlx.core as mx

from ...models.blockwise import BlockwiseModel
from ...models.hooks import (
    CapturedInputs,
    capture_inputs,
    override_inputs,
    override_outputs,
)
from ...run.fs import require_space
from . import activation_cache
from .activation_cache import FULL, INPUTS, ROUNDED
from .error_propagation import CalibrationShard, sum_up
from .input_statistics import InputStatistics

OF_FULL = f"{INPUTS}-{FULL}"
RESIDUAL = ".residual"
# How far off the sum may be, as a share: as much as low precision makes of it.
AS_IT_IS = 0.02


class BlockCalibration:
    """One block, its weights at hand, between the hidden states around it.

    Args:
        paths: of the layers to quantize, in the block.
        tokens: int32 [B, L], in parts.
        before, after: the folders of the hidden states.
        compares: whether there is a full-precision stream too.

    Attributes:
        groups: layers that share their input, in the order of their calls.

    Raises:
        UserError: there is too little room for what is kept.
    """

    def __init__(
        self,
        blockwise: BlockwiseModel,
        number: int,
        paths: list[str],
        tokens: list[mx.array],
        before: Path,
        after: Path,
        *,
        compares: bool,
    ):
        self.blockwise = blockwise
        self.number = number
        self.tokens = tokens
        self.before = before
        self.after = after
        self.compares = compares
        seen = self._looked_at(paths)
        self.groups = seen.groups()
        self._again = seen.called_again
        self._known: list[list[str]] = []
        self._adding = [g[0] for g in self.groups if compares and self._adds(g)]
        self._check_space(seen)

    def pass_full(self) -> None:
        """The full-precision stream, and what goes into the layers, on disk.

        That of a mixture's experts is not compared and so not kept.
        """
        paths = [g[0] for g in self.groups if self._experts(g[0]) is None]
        for part in range(len(self.tokens)):
            with capture_inputs(self._block, paths) as seen:
                outputs = self._run(part, FULL)
            activation_cache.save(self.after, FULL, part, {"hidden": outputs})
            kept = dict(seen.rows)
            for path in self._adding:
                with self._without(path):
                    kept[f"{path}{RESIDUAL}"] = self._run(part, FULL)
            activation_cache.save(self.after, OF_FULL, part, kept)

    def moments(
        self, group: list[str], weights: list[mx.array] | None = None
    ) -> InputStatistics:
        """Of what goes into layers, those of earlier groups being quantized.

        Args:
            weights: of the tokens, float32 [B * L] by part; None = all count alike. Of
                those that go to experts it counts only whether they are 0.
        """
        path = group[0]
        width = dict(self._block.named_modules())[path].weight.shape[-1]
        experts = self._experts(path)
        compares = self.compares and experts is None
        found = InputStatistics.empty(width, experts=experts, with_cross=compares)
        if compares:
            modules = dict(self._block.named_modules())
            prefix = f"{self.blockwise.prefix}{self.number}."
            dense = {f"{prefix}{name}": modules[name].weight for name in group}
            tokens = sum(part.size for part in self.tokens)
            sum_up(found, self._compared(group, weights), tokens, dense)
        else:
            for part in range(len(self.tokens)):
                seen, own = self._goes_in(path, part), weights and weights[part]
                if experts is None:
                    found.add(seen.rows[path], weights=own)
                else:
                    is_in = None if own is None else own > 0
                    found.add_routed(seen.rows[path], seen.experts[path], is_in)
        self._known.append(group)
        return found

    def _goes_in(self, path: str, part: int) -> CapturedInputs:
        """What goes into a layer of the quantized stream, which is kept."""
        with capture_inputs(self._block, [path]) as seen:
            self._run_on(part)
        kept = {"x": seen.objects[path]}
        activation_cache.save(self.after, f"{INPUTS}-{path}", part, kept)
        return seen

    def _compared(
        self, group: list[str], weights: list[mx.array] | None
    ) -> Iterator[CalibrationShard]:
        path = group[0]
        for part in range(len(self.tokens)):
            seen, own = self._goes_in(path, part), weights and weights[part]
            full, errors = activation_cache.load(self.after, OF_FULL, part), None
            if path in self._adding:
                with self._without(path):
                    here = self._run_on(part)
                errors = full[f"{path}{RESIDUAL}"] - here.astype(mx.float32)
                errors = errors.reshape(-1, errors.shape[-1])
            yield CalibrationShard(seen.rows[path], full[path], errors, own)

    def forget(self) -> None:
        """No input is known any more: other weights were put into the block."""
        self._known.clear()

    def leave(self) -> None:
        """The quantized stream to the end of the block."""
        for part in range(len(self.tokens)):
            hidden = {"hidden": self._run_on(part)}
            activation_cache.save(self.after, ROUNDED, part, hidden)
        activation_cache.drop(self.after, INPUTS)

    @property
    def _block(self):
        return self.blockwise.blocks[self.number]

    def _experts(self, path: str) -> int | None:
        shape = dict(self._block.named_modules())[path].weight.shape
        return shape[0] if len(shape) == 3 else None

    def _looked_at(self, paths: list[str]) -> CapturedInputs:
        """What one window shows of the layers."""
        with capture_inputs(self._block, paths) as seen:
            window = self._one_window()
            self.blockwise.run(self.number, self.tokens[0][:1], window)
        return seen

    def _check_space(self, seen: CapturedInputs) -> None:
        hidden = self._one_window()
        inputs = {id(value): value.nbytes for value in seen.objects.values()}
        windows = sum(part.size for part in self.tokens) / hidden.shape[1]
        each = (hidden.nbytes + sum(inputs.values())) * (1 + self.compares)
        each += hidden.nbytes * len(self._adding)
        require_space(self.after.parent, ceil(windows * each))

    def _adds(self, group: list[str]) -> bool:
        """Whether what layers give is added to the residual stream as it is."""
        path, hidden = group[0], self._one_window()
        weight = dict(self._block.named_modules())[path].weight
        if len(group) > 1 or path in self._again or weight.ndim > 2:
            return False
        if len(weight) != hidden.shape[-1]:
            return False
        # About as large as what it is added to: half precision holds the sum.
        draw = mx.random.uniform(-1, 1, hidden.shape, key=mx.random.key(0))
        shift = (draw * mx.abs(hidden).max()).astype(hidden.dtype)
        found = []
        for given in (mx.zeros_like(shift), shift):
            with self._without(path, given):
                run = self.blockwise.run(self.number, self.tokens[0][:1], hidden)
            found.append(run.astype(mx.float32))
        # The norm of many numbers is more than half precision holds.
        shift = shift.astype(mx.float32)
        off = mx.linalg.norm(found[1] - found[0] - shift)
        return (off < AS_IT_IS * mx.linalg.norm(shift)).item()

    @contextmanager
    def _without(self, path: str, given: mx.array | float = 0.0) -> Iterator[None]:
        """The block ends where a layer adds to the residual stream, by this alone."""
        order = [name for group in self.groups for name in group]
        later = order[order.index(path) + 1 :]
        with (
            override_outputs(self._block, later, mx.zeros_like),
            override_outputs(self._block, [path], lambda y: mx.zeros_like(y) + given),
        ):
            yield

    def _one_window(self) -> mx.array:
        return activation_cache.load(self.before, ROUNDED, 0)["hidden"][:1]

    def _run(self, part: int, stream: str) -> mx.array:
        hidden = activation_cache.load(self.before, stream, part)["hidden"]
        return self.blockwise.run(self.number, self.tokens[part], hidden)

    def _run_on(self, part: int) -> mx.array:
        """The quantized stream, from the inputs that are known."""
        known = {}
        for group in self._known:
            x = activation_cache.load(self.after, f"{INPUTS}-{group[0]}", part)["x"]
            known |= {path: x for path in group if path not in self._again}
        with override_inputs(self._block, known):
            return self._run(part, ROUNDED)
