"""What goes into layers behind the last block, such as a head."""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx

from ...models.blockwise import BlockwiseModel
from ...models.hooks import CapturedInputs, capture_inputs
from . import activation_cache
from .activation_cache import FULL, ROUNDED
from .error_propagation import CalibrationShard, sum_up
from .input_statistics import InputStatistics


class HeadCalibration:
    """The hidden states behind the last block, and the layers they go into.

    Args:
        paths: of layers outside the blocks.
        tokens: int32 [B, L], in parts.
        counted: bool [B, L], in parts: the rows that are summed up.
        end: the folder of the hidden states.
        compares: whether there is a full-precision stream too.
    """

    def __init__(
        self,
        blockwise: BlockwiseModel,
        paths: list[str],
        tokens: list[mx.array],
        counted: list[mx.array],
        end: Path,
        *,
        compares: bool,
    ):
        self.blockwise = blockwise
        self.paths = paths
        self.tokens = tokens
        self.counted = counted
        self.end = end
        self.streams = [ROUNDED, FULL] if compares else [ROUNDED]

    def groups(self) -> list[list[str]]:
        """Paths of layers that share their input; of others there are none."""
        hidden = self._hidden(ROUNDED, 0)[:1]
        return self._seen(self.paths, self.tokens[0][:1], hidden).groups()

    def moments(self, group: list[str]) -> InputStatistics:
        """Of what goes into layers that share it."""
        modules = dict(self.blockwise.model.named_modules())
        weights, path = {p: modules[p].weight for p in group}, group[0]
        width = weights[path].shape[-1]
        compares = len(self.streams) > 1
        found = InputStatistics.empty(width, experts=None, with_cross=compares)
        if compares:
            tokens = sum(part.size for part in self.tokens)
            sum_up(found, self._compared(path), tokens, weights)
        else:
            for part in range(len(self.tokens)):
                (x,), counted = self._rows(path, part)
                found.add(x, weights=counted)
        return found

    def _compared(self, path: str) -> Iterator[CalibrationShard]:
        for part in range(len(self.tokens)):
            (x, y), counted = self._rows(path, part)
            yield CalibrationShard(x, y, None, counted)

    def _rows(self, path: str, part: int) -> tuple[list[mx.array], mx.array]:
        """What goes into a layer in every stream, and which of it counts."""
        tokens = self.tokens[part]
        hidden = [self._hidden(stream, part) for stream in self.streams]
        rows = [self._seen([path], tokens, h).rows[path] for h in hidden]
        return rows, self.counted[part].reshape(-1).astype(mx.float32)

    def _hidden(self, stream: str, part: int) -> mx.array:
        return activation_cache.load(self.end, stream, part)["hidden"]

    def _seen(
        self, paths: list[str], tokens: mx.array, hidden: mx.array
    ) -> CapturedInputs:
        with capture_inputs(self.blockwise.model, paths) as seen:
            self.blockwise.last(tokens, hidden)
        return seen
