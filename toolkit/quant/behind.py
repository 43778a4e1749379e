"""What goes into layers behind the last block, such as a head."""

from pathlib import Path

import mlx.core as mx

from ..model.blockwise import Blockwise
from . import streams
from .inputs import Moments, Seen, watched
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

    def moments(self, path: str) -> Moments:
        """Of what goes into a layer."""
        width = dict(self.blockwise.model.named_modules())[path].weight.shape[-1]
        compares = len(self.streams) > 1
        found = Moments.empty(width, experts=None, with_cross=compares)
        for part, tokens in enumerate(self.tokens):
            hidden = [self._hidden(stream, part) for stream in self.streams]
            rows = [self._seen([path], tokens, h).rows[path] for h in hidden]
            weights = self.counted[part].reshape(-1).astype(mx.float32)
            found.add(*rows, weights=weights)
        return found

    def _hidden(self, stream: str, part: int) -> mx.array:
        return streams.load(self.end, stream, part)["hidden"]

    def _seen(self, paths: list[str], tokens: mx.array, hidden: mx.array) -> Seen:
        with watched(self.blockwise.model, paths) as seen:
            self.blockwise.last(tokens, hidden)
        return seen
