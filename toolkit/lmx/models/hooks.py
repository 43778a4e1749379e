"""Where a model keeps its blocks, and how to put something in a module's place."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn


@dataclass(frozen=True)
class TransformerBlocks:
    """The list of a model's blocks.

    Attributes:
        path: of the module that holds the list, its trunk.
        name: of the list in the trunk.
    """

    trunk: nn.Module
    path: str
    name: str

    @property
    def prefix(self) -> str:
        """What the names of all parameters of the blocks begin with."""
        return f"{self.path}.{self.name}." if self.path else f"{self.name}."


def find_blocks(model: nn.Module) -> TransformerBlocks | None:
    """The blocks that `model.layers` names; None if there are none."""
    layers = getattr(model, "layers", None)
    if not layers:
        return None
    for path, module in model.named_modules():
        for name, value in module.items():
            if isinstance(value, list) and any(block is layers[0] for block in value):
                return TransformerBlocks(module, path, name)
    return None


class ModuleProxy:
    """Is called in a module's place; all else is the module's, even its class."""

    def __init__(self, module: nn.Module, call):
        self._module = module
        self._call = call

    def __call__(self, *arguments, **settings):
        return self._call(*arguments, **settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    # Some models ask by `isinstance` what a block is, to give it its mask.
    @property
    def __class__(self) -> type:
        return type(self._module)


@contextmanager
def replace_module(owner: nn.Module, name: str, other: Any) -> Iterator[None]:
    """`other` in the place of a module's child, of this instance alone, for a while."""
    before = owner[name]
    owner[name] = other
    try:
        yield
    finally:
        owner[name] = before


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """A model in training, in which no kernel is used that has no derivative."""
    before = model.training
    model.train()
    try:
        yield
    finally:
        model.train(before)


# --- from quant.signals: What goes into every layer, and how the loss answers to what comes out of it.
#
# The loss is that of tokens drawn from the model's own predictions, so that the mean
# square of an answer is a second derivative of the divergence from the model (the Fisher
# information), whatever text the model is watched on.


@dataclass
class GradientTap:
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


class _GradientTapHook(ModuleProxy):
    def __init__(self, layer: nn.Module, path: str, tap: GradientTap):
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
def tap_outputs(model: nn.Module, paths: list[str], tap: GradientTap) -> Iterator[None]:
    """Let the layers at `paths` tell the tap of their calls while this is open."""
    modules = dict(model.named_modules())
    with ExitStack() as stack:
        for path in paths:
            above, _, name = path.rpartition(".")
            stand_in = _GradientTapHook(modules[path], path, tap)
            stack.enter_context(_in_place(modules, above, name, stand_in))
        yield


def _in_place(modules: dict[str, nn.Module], above: str, name: str, stand_in):
    if above in modules:
        return replace_module(modules[above], name, stand_in)
    # A list is no module of its own.
    owner, _, key = above.rpartition(".")
    return replace_module(modules[owner][key], int(name), stand_in)


# --- from quant.inputs: What goes into the layers of a block, looked at as it passes.


@dataclass
class CapturedInputs:
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
def capture_inputs(root: nn.Module, paths: list[str]) -> Iterator[CapturedInputs]:
    """Note what the layers at `paths` in `root` are called with."""
    seen = CapturedInputs()
    with ExitStack() as stack:
        for path in paths:
            stack.enter_context(_replaced(root, path, _InputHook, path, seen))
        yield seen


@contextmanager
def override_inputs(root: nn.Module, inputs: dict[str, mx.array]) -> Iterator[None]:
    """Layers by path take these inputs in the place of those they are called with."""
    with ExitStack() as stack:
        for path, x in inputs.items():
            stack.enter_context(_replaced(root, path, _InputOverride, x))
        yield


@contextmanager
def override_outputs(
    root: nn.Module, paths: list[str], made: Callable[[mx.array], mx.array]
) -> Iterator[None]:
    """Layers give what is made of their outputs."""
    with ExitStack() as stack:
        for path in paths:
            stack.enter_context(_replaced(root, path, _OutputOverride, made))
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


class _InputHook(ModuleProxy):
    # Nothing in it leads back to it: what was seen is to be let go without a search.
    def __init__(self, layer: nn.Module, path: str, seen: CapturedInputs):
        super().__init__(layer, partial(_look, layer, path, seen))
        self._path = path
        self._seen = seen

    def as_linear(self, x: mx.array) -> mx.array:
        """An embedding used as the head."""
        _note(self._path, self._seen, x)
        return self._module.as_linear(x)


class _InputOverride(ModuleProxy):
    def __init__(self, layer: nn.Module, x: mx.array):
        super().__init__(layer, lambda _, *rest, **more: layer(x, *rest, **more))


class _OutputOverride(ModuleProxy):
    def __init__(self, layer: nn.Module, made: Callable[[mx.array], mx.array]):
        super().__init__(layer, lambda *inputs, **more: made(layer(*inputs, **more)))


def _look(
    layer: nn.Module, path: str, seen: CapturedInputs, *inputs, **more
) -> mx.array:
    _note(path, seen, *inputs[:2])
    return layer(*inputs, **more)


def _note(
    path: str, seen: CapturedInputs, x: mx.array, experts: mx.array | None = None
) -> None:
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
