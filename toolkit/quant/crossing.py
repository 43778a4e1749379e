"""The calibration tokens' way through one block, as its layers are quantized.

What goes into a layer is kept on disk until the block is done: a later pass begins
there, for MLX computes nothing whose result is not used, and so no layer of the
quantized stream multiplies much more than once.
"""

from math import ceil
from pathlib import Path

import mlx.core as mx

from ..model.blockwise import Blockwise
from ..run.files import need_space
from . import streams
from .inputs import Moments, Seen, resumed, watched
from .streams import FULL, INPUTS, ROUNDED

OF_FULL = f"{INPUTS}-{FULL}"


class Crossing:
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
        blockwise: Blockwise,
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
        self._again = seen.again
        self._known: list[list[str]] = []

    def pass_full(self) -> None:
        """The full-precision stream, and what goes into the layers, on disk.

        That of a mixture's experts is not compared and so not kept.
        """
        paths = [g[0] for g in self.groups if self._experts(g[0]) is None]
        for part in range(len(self.tokens)):
            with watched(self._block, paths) as seen:
                outputs = self._run(part, FULL)
            streams.save(self.after, FULL, part, {"hidden": outputs})
            streams.save(self.after, OF_FULL, part, seen.rows)

    def moments(
        self, group: list[str], weights: list[mx.array] | None = None
    ) -> Moments:
        """Of what goes into layers, those of earlier groups being quantized.

        Args:
            weights: of the tokens, float32 [B * L] by part; None = all count alike. Of
                those that go to experts it counts only whether they are 0.
        """
        path = group[0]
        width = dict(self._block.named_modules())[path].weight.shape[-1]
        experts = self._experts(path)
        compares = self.compares and experts is None
        found = Moments.empty(width, experts=experts, with_cross=compares)
        for part in range(len(self.tokens)):
            with watched(self._block, [path]) as seen:
                self._run_on(part)
            kept = {"x": seen.objects[path]}
            streams.save(self.after, f"{INPUTS}-{path}", part, kept)
            rows, own = seen.rows[path], weights and weights[part]
            if experts is not None:
                is_in = None if own is None else own > 0
                found.add_routed(rows, seen.experts[path], is_in)
            elif compares:
                full = streams.load(self.after, OF_FULL, part)[path]
                found.add(rows, full, own)
            else:
                found.add(rows, weights=own)
        self._known.append(group)
        return found

    def forget(self) -> None:
        """No input is known any more: other weights were put into the block."""
        self._known.clear()

    def leave(self) -> None:
        """The quantized stream to the end of the block."""
        for part in range(len(self.tokens)):
            hidden = {"hidden": self._run_on(part)}
            streams.save(self.after, ROUNDED, part, hidden)
        streams.drop(self.after, INPUTS)

    @property
    def _block(self):
        return self.blockwise.blocks[self.number]

    def _experts(self, path: str) -> int | None:
        shape = dict(self._block.named_modules())[path].weight.shape
        return shape[0] if len(shape) == 3 else None

    def _looked_at(self, paths: list[str]) -> Seen:
        """What one window shows of the layers, which is thrown away."""
        hidden = streams.load(self.before, ROUNDED, 0)["hidden"][:1]
        with watched(self._block, paths) as seen:
            self.blockwise.run(self.number, self.tokens[0][:1], hidden)
        inputs = {id(value): value.nbytes for value in seen.objects.values()}
        windows = sum(part.size for part in self.tokens) / hidden.shape[1]
        each = hidden.nbytes + sum(inputs.values())
        need_space(self.after.parent, ceil(windows * each * (1 + self.compares)))
        return seen

    def _run(self, part: int, stream: str) -> mx.array:
        hidden = streams.load(self.before, stream, part)["hidden"]
        return self.blockwise.run(self.number, self.tokens[part], hidden)

    def _run_on(self, part: int) -> mx.array:
        """The quantized stream, from the inputs that are known."""
        known = {}
        for group in self._known:
            x = streams.load(self.after, f"{INPUTS}-{group[0]}", part)["x"]
            known |= {path: x for path in group if path not in self._again}
        with resumed(self._block, known):
            return self._run(part, ROUNDED)
