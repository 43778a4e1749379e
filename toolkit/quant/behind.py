"""What goes into layers behind the last block, such as a head."""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx

from ..model.blockwise import Blockwise
from . import streams
from .inputs import Moments, Seen, watched
from .making_up import Rows, sum_up
from .streams import FULL, ROUNDED


class Behind:
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
        blockwise: Blockwise,
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

    def moments(self, group: list[str]) -> Moments:
        """Of what goes into layers that share it."""
        modules = dict(self.blockwise.model.named_modules())
        weights, path = {p: modules[p].weight for p in group}, group[0]
        width = weights[path].shape[-1]
        compares = len(self.streams) > 1
        found = Moments.empty(width, experts=None, with_cross=compares)
        if compares:
            tokens = sum(part.size for part in self.tokens)
            sum_up(found, self._compared(path), tokens, weights)
        else:
            for part in range(len(self.tokens)):
                (x,), counted = self._rows(path, part)
                found.add(x, weights=counted)
        return found

    def _compared(self, path: str) -> Iterator[Rows]:
        for part in range(len(self.tokens)):
            (x, y), counted = self._rows(path, part)
            yield Rows(x, y, None, counted)

    def _rows(self, path: str, part: int) -> tuple[list[mx.array], mx.array]:
        """What goes into a layer in every stream, and which of it counts."""
        tokens = self.tokens[part]
        hidden = [self._hidden(stream, part) for stream in self.streams]
        rows = [self._seen([path], tokens, h).rows[path] for h in hidden]
        return rows, self.counted[part].reshape(-1).astype(mx.float32)

    def _hidden(self, stream: str, part: int) -> mx.array:
        return streams.load(self.end, stream, part)["hidden"]

    def _seen(self, paths: list[str], tokens: mx.array, hidden: mx.array) -> Seen:
        with watched(self.blockwise.model, paths) as seen:
            self.blockwise.last(tokens, hidden)
        return seen
