"""What goes into every layer, and how the loss answers to what comes out of it.

The loss is that of tokens drawn from the model's own predictions, so that the mean
square of an answer is a second derivative of the divergence from the model (the Fisher
information), whatever text the model is watched on.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ..model.blocks import StandIn, differentiable, swapped
from ..run.files import need_space


@dataclass
class Tap:
    """The calls of layers in one forward pass, and what is added to their outputs.

    Every attribute is by call: a layer's path and how often it was called before, for
    an embedding may be the head too.

    Attributes:
        shifts: what is added; a call without one is only noted.
        inputs: tokens, or hidden states [..., K].
        experts: which expert of a mixture every row goes to.
        outputs: [..., N].
        sources: the first call with the very same input.
    """

    shifts: dict[str, mx.array] = field(default_factory=dict)
    inputs: dict[str, mx.array] = field(default_factory=dict)
    experts: dict[str, mx.array] = field(default_factory=dict)
    outputs: dict[str, mx.array] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def __call__(self, path: str, layer: Callable, x, *more, **settings) -> mx.array:
        name = f"{path}:{sum(path_of(call) == path for call in self.outputs)}"
        y = layer(x, *more, **settings)
        same = (call for call, other in self.inputs.items() if other is x)
        self.sources[name] = next(same, name)
        self.inputs[name], self.outputs[name] = x, y
        if more:
            self.experts[name] = more[0]
        return y + self.shifts[name].astype(y.dtype) if name in self.shifts else y


class _Tapped(StandIn):
    def __init__(self, layer: nn.Module, path: str, tap: Tap):
        super().__init__(layer, lambda *given, **more: tap(path, layer, *given, **more))
        self._path, self._tap = path, tap

    def as_linear(self, x: mx.array) -> mx.array:
        """An embedding used as the head."""
        return self._tap(self._path, self._module.as_linear, x)


def path_of(call: str) -> str:
    """The layer of a call."""
    return call.rpartition(":")[0]


def is_hidden(x: mx.array) -> bool:
    """Whether it is hidden states rather than tokens."""
    return mx.issubdtype(x.dtype, mx.floating)


@contextmanager
def tapped(model: nn.Module, paths: list[str], tap: Tap) -> Iterator[None]:
    """Let the layers at `paths` tell the tap of their calls while this is open."""
    modules = dict(model.named_modules())
    with ExitStack() as stack:
        for path in paths:
            above, _, name = path.rpartition(".")
            stand_in = _Tapped(modules[path], path, tap)
            stack.enter_context(_in_place(modules, above, name, stand_in))
        yield


def _in_place(modules: dict[str, nn.Module], above: str, name: str, stand_in):
    if above in modules:
        return swapped(modules[above], name, stand_in)
    # A list is no module of its own.
    owner, _, key = above.rpartition(".")
    return swapped(modules[owner][key], int(name), stand_in)


@dataclass(frozen=True)
class Signals:
    """What `collect` has written.

    Attributes:
        folder: a file for every window, with inputs.* and experts.* by source, and
            slopes.*, the loss's derivatives by the outputs, by call.
        sources: by call, the first one with the very same input.
        tokens: how many the model was watched on.
    """

    folder: Path
    sources: dict[str, str]
    tokens: int

    def groups(self) -> list[list[str]]:
        """Paths of layers that share their first input, in the order of the calls."""
        found: dict[str, list[str]] = {}
        placed: set[str] = set()
        for call, source in self.sources.items():
            if path_of(call) not in placed:
                found.setdefault(source, []).append(path_of(call))
                placed.add(path_of(call))
        return list(found.values())

    def calls(self, path: str) -> list[str]:
        """The calls of one layer."""
        return [call for call in self.sources if path_of(call) == path]

    def parts(self) -> Iterator[dict[str, mx.array]]:
        """What was written, lazy, by window."""
        for file in sorted(self.folder.glob("part-*")):
            yield mx.load(str(file))


def collect(
    model: nn.Module, paths: list[str], tokens: mx.array, folder: Path, *, seed: int
) -> Signals:
    """Watch the layers at `paths` on windows [n, L], one by one.

    Raises:
        UserError: the disk has no room for it.
    """
    for number, window in enumerate(tokens):
        key = mx.random.key(seed + number)
        sources, found = _watch(model, paths, window[None], key)
        if number == 0:
            size = sum(value.nbytes for value in found.values())
            need_space(folder, size * len(tokens))
        mx.save_safetensors(str(folder / f"part-{number:04d}.safetensors"), found)
    return Signals(folder, sources, tokens.size)


def loss_of_predictions(
    logits: mx.array, key: mx.array, counted: mx.array | None = None
) -> mx.array:
    """The loss, summed up, of tokens drawn from logits [..., vocabulary] themselves.

    Args:
        counted: bool [...], True where a position counts; None = everywhere.
    """
    logits = logits.astype(mx.float32)
    drawn = mx.random.categorical(mx.stop_gradient(logits), key=key)
    chosen = mx.take_along_axis(logits, drawn[..., None], axis=-1)
    losses = mx.logsumexp(logits, axis=-1) - chosen[..., 0]
    return (losses if counted is None else mx.where(counted, losses, 0.0)).sum()


def _watch(model: nn.Module, paths: list[str], tokens: mx.array, key: mx.array):
    """Sources by call, and by name what a file has of one window."""
    first = Tap()
    with tapped(model, paths, first):
        model(tokens)

    def loss(shifts):
        tap = Tap(shifts)
        with tapped(model, paths, tap):
            logits = model(tokens)
        return loss_of_predictions(logits, key), tap.inputs, tap.experts

    zeros = {call: mx.zeros_like(y) for call, y in first.outputs.items()}
    with differentiable(model):
        (_, inputs, experts), slopes = mx.value_and_grad(loss)(zeros)
    found = {f"slopes.{call}": _rows(slope) for call, slope in slopes.items()}
    for call in set(first.sources.values()):
        found |= _inputs(call, inputs[call], experts.get(call))
    return first.sources, found


def _inputs(call: str, x: mx.array, experts: mx.array | None) -> dict[str, mx.array]:
    if not is_hidden(x):
        return {f"inputs.{call}": x.reshape(-1)}
    if experts is None:
        return {f"inputs.{call}": _rows(x)}
    # [..., 1, K] for each of the experts, or for all of them alike.
    x = mx.broadcast_to(x.squeeze(-2), (*experts.shape, x.shape[-1]))
    return {f"inputs.{call}": _rows(x), f"experts.{call}": experts.reshape(-1)}


def _rows(x: mx.array) -> mx.array:
    return x.reshape(-1, x.shape[-1])
