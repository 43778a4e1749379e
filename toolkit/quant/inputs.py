"""What goes into the layers of a block, looked at as it passes."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn

from ..model.blocks import StandIn
from .signals import is_hidden


@dataclass
class Seen:
    """Inputs of layers by path, in the order in which they were called.

    Attributes:
        rows: [T, K].
        experts: int [T], which expert of a mixture each row went to.
        again: layers that were called more than once; of the last call is all else.
    """

    rows: dict[str, mx.array] = field(default_factory=dict)
    experts: dict[str, mx.array] = field(default_factory=dict)
    again: set[str] = field(default_factory=set)
    # The very objects, by which layers with the same input are known.
    objects: dict[str, mx.array] = field(default_factory=dict)

    def groups(self) -> list[list[str]]:
        """Paths of layers that share their input, in the order of the calls."""
        found: dict[int, list[str]] = {}
        for path, value in self.objects.items():
            found.setdefault(id(value), []).append(path)
        return list(found.values())


@contextmanager
def watched(root: nn.Module, paths: list[str]) -> Iterator[Seen]:
    """Note what the layers at `paths` in `root` are called with."""
    seen = Seen()
    with ExitStack() as stack:
        for path in paths:
            stack.enter_context(_replaced(root, path, _Watched, path, seen))
        yield seen


@contextmanager
def resumed(root: nn.Module, inputs: dict[str, mx.array]) -> Iterator[None]:
    """Layers by path take these inputs in the place of those they are called with."""
    with ExitStack() as stack:
        for path, x in inputs.items():
            stack.enter_context(_replaced(root, path, _Resumed, x))
        yield


@contextmanager
def giving(
    root: nn.Module, paths: list[str], made: Callable[[mx.array], mx.array]
) -> Iterator[None]:
    """Layers give what is made of their outputs."""
    with ExitStack() as stack:
        for path in paths:
            stack.enter_context(_replaced(root, path, _Giving, made))
        yield


@contextmanager
def _replaced(root: nn.Module, path: str, stand_in: type, *arguments) -> Iterator[None]:
    owner = root
    *way, name = path.split(".")
    for part in way:
        owner = owner[int(part)] if isinstance(owner, list) else owner[part]
    key = int(name) if isinstance(owner, list) else name
    layer = owner[key]
    owner[key] = stand_in(layer, *arguments)
    try:
        yield
    finally:
        owner[key] = layer


class _Watched(StandIn):
    # Nothing in it leads back to it: what was seen is to be let go without a search.
    def __init__(self, layer: nn.Module, path: str, seen: Seen):
        super().__init__(layer, partial(_look, layer, path, seen))
        self._path = path
        self._seen = seen

    def as_linear(self, x: mx.array) -> mx.array:
        """An embedding used as the head."""
        _note(self._path, self._seen, x)
        return self._module.as_linear(x)


class _Resumed(StandIn):
    def __init__(self, layer: nn.Module, x: mx.array):
        super().__init__(layer, lambda _, *rest, **more: layer(x, *rest, **more))


class _Giving(StandIn):
    def __init__(self, layer: nn.Module, made: Callable[[mx.array], mx.array]):
        super().__init__(layer, lambda *inputs, **more: made(layer(*inputs, **more)))


def _look(layer: nn.Module, path: str, seen: Seen, *inputs, **more) -> mx.array:
    _note(path, seen, *inputs[:2])
    return layer(*inputs, **more)


def _note(path: str, seen: Seen, x: mx.array, experts: mx.array | None = None) -> None:
    if not is_hidden(x):
        # Tokens that are looked up.
        return
    if path in seen.objects:
        seen.again.add(path)
    seen.objects[path] = x
    if experts is not None:
        # [..., 1, K] for each of the experts, or for all of them alike.
        x = mx.broadcast_to(x.squeeze(-2), (*experts.shape, x.shape[-1]))
        seen.experts[path] = experts.reshape(-1)
    seen.rows[path] = x.reshape(-1, x.shape[-1])


@dataclass
class Moments:
    """Sums over inputs X of the quantized model and Y of the full-precision one.

    Attributes:
        squares: X'X, float32 [K, K]; of a mixture [E, K, K].
        cross: X'(Y - X), float32 [K, K], if there is a Y.
        counts: rows summed up; of a mixture [E].
        residual: D'X, float32 [N, K], of what the residual stream has lost where the
            layer adds to it; None = it adds to none.
        shares: by path how far layers are to make up for what they miss; see
            `making_up`.
        answers: of layers by path the Fisher information of what comes out of them,
            float32 [N, N], as far as it is known.
        clusters: int [N], which of squares [C, K, K] each row of the weight has; None =
            all have the same, [K, K].
    """

    squares: mx.array
    cross: mx.array | None
    counts: mx.array
    residual: mx.array | None = None
    shares: dict[str, float] = field(default_factory=dict)
    answers: dict[str, mx.array] = field(default_factory=dict)
    clusters: mx.array | None = None

    @classmethod
    def empty(cls, width: int, *, experts: int | None, with_cross: bool) -> "Moments":
        shape = (width, width) if experts is None else (experts, width, width)
        cross = mx.zeros(shape) if with_cross else None
        return cls(mx.zeros(shape), cross, mx.zeros(shape[:-2], mx.int32))

    def add(
        self,
        x: mx.array,
        y: mx.array | None = None,
        errors: mx.array | None = None,
        weights: mx.array | None = None,
    ) -> None:
        """Rows [T, K] of both models, and what they count, [T]; None = all alike.

        Args:
            errors: [T, N], what the residual stream has lost.
        """
        x = x.astype(mx.float32)
        left = (x if weights is None else x * weights[:, None]).T
        # One sum after the other: only one product is in memory at a time.
        self.squares = self.squares + left @ x
        self.counts = self.counts + len(x)
        mx.eval(self.squares, self.counts)
        if y is not None:
            self.cross = self.cross + left @ (y.astype(mx.float32) - x)
            mx.eval(self.cross)
        if errors is not None:
            lost = (left @ errors.astype(mx.float32)).T
            self.residual = lost if self.residual is None else self.residual + lost
            mx.eval(self.residual)

    def add_routed(
        self, x: mx.array, experts: mx.array, seen: mx.array | None = None
    ) -> None:
        """Rows [T, K], and the expert each went to, int [T].

        Args:
            seen: bool [T], or of fewer tokens that have several rows each; False = left
                out; None = all are in.
        """
        if seen is not None and not seen.all().item():
            seen = mx.repeat(seen, len(x) // len(seen))
            # As of an expert more, so that no shape depends on a value.
            experts = mx.where(seen, experts, len(self.squares))
        order = mx.argsort(experts)
        x, sorted_experts = x.astype(mx.float32)[order], experts[order]
        bounds = mx.arange(len(self.squares) + 1)[:, None]
        ends = (sorted_experts[None] < bounds).sum(axis=1).tolist()
        parts = []
        for start, end in pairwise(ends):
            rows = x[start:end]
            parts.append(rows.T @ rows)
        self.squares = self.squares + mx.stack(parts)
        self.counts = self.counts + mx.array(ends[1:]) - mx.array(ends[:-1])
        mx.eval(self.squares, self.counts)
