"""Hooks: find the blocks of a model, replace modules, record and change calls.

`ModuleProxy` and `replace_module` put something in a module's place. `hook_calls` sends
the calls of chosen layers through a function; the recorders `CapturedInputs` and
`GradientTap` and the overrides are such functions. `forward_with_hidden_states` records
the outputs of chosen blocks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError

TARGET_HINT = "architecture: model works with every target"


@dataclass(frozen=True)
class TransformerBlocks:
    """The list of a model's transformer blocks.

    Attributes:
        trunk: the module that holds the list.
        path: path of the trunk in the model.
        name: name of the list in the trunk.
    """

    trunk: nn.Module
    path: str
    name: str

    @property
    def prefix(self) -> str:
        """What the names of all block parameters start with, before the block index."""
        return f"{self.path}.{self.name}." if self.path else f"{self.name}."


def find_blocks(model: nn.Module) -> TransformerBlocks | None:
    """Find the list that `model.layers` returns. None if the model has no blocks."""
    layers = getattr(model, "layers", None)
    if not layers:
        return None
    for path, module in model.named_modules():
        for name, value in module.items():
            if isinstance(value, list) and any(block is layers[0] for block in value):
                return TransformerBlocks(module, path, name)
    return None


class ModuleProxy:
    """Stands in for a module: calls go to `call`, all attributes to the module."""

    def __init__(self, module: nn.Module, call: Callable):
        self._module = module
        self._call = call

    def __call__(self, *args, **kwargs):
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __getitem__(self, name: str) -> Any:
        return self._module[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._module[name] = value

    # Some models use `isinstance` on a block to choose its mask.
    @property
    def __class__(self) -> type:
        return type(self._module)


@contextmanager
def replace_module(
    owner: nn.Module | list, name: str | int, other: Any
) -> Iterator[None]:
    """Replace a child of this module (or an item of this list) inside the context."""
    original = owner[name]
    owner[name] = other
    try:
        yield
    finally:
        owner[name] = original


def put_in_front(kind: type, layer: nn.Module) -> None:
    """Call a layer through a class that it then has, too."""
    layer.__class__ = _in_front(kind, type(layer))


@cache
def _in_front(kind: type, layer_class: type[nn.Module]) -> type[nn.Module]:
    return type(layer_class.__name__, (kind, layer_class), {})


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Put the model in training mode, where every kernel in use has a gradient."""
    was_training = model.training
    model.train()
    try:
        yield
    finally:
        model.train(was_training)


# Called with the path of a layer, its forward function and the arguments of the call.
# Returns the output of the layer.
CallHook = Callable[..., mx.array]


@contextmanager
def hook_calls(root: nn.Module, paths: list[str], hook: CallHook) -> Iterator[None]:
    """Send the calls of the layers at `paths` through `hook` inside the context.

    An embedding that is also used as the output head (`as_linear`) is hooked in both
    roles.
    """
    with ExitStack() as stack:
        for path in paths:
            owner: Any = root
            *parents, name = path.split(".")
            for parent in parents:
                owner = owner[int(parent) if isinstance(owner, list) else parent]
            key = int(name) if isinstance(owner, list) else name
            proxy = _HookedLayer(owner[key], path, hook)
            stack.enter_context(replace_module(owner, key, proxy))
        yield


class _HookedLayer(ModuleProxy):
    # It holds no reference to itself. So what a hook recorded is freed by reference
    # counting alone, without the garbage collector.
    def __init__(self, layer: nn.Module, path: str, hook: CallHook):
        super().__init__(layer, layer)
        self._path = path
        self._hook = hook

    def __call__(self, *args, **kwargs):
        return self._hook(self._path, self._module, *args, **kwargs)

    def as_linear(self, x: mx.array) -> mx.array:
        return self._hook(self._path, self._module.as_linear, x)


def is_hidden(x: mx.array) -> bool:
    """Whether `x` holds hidden states rather than token ids."""
    return mx.issubdtype(x.dtype, mx.floating)


@dataclass
class CapturedInputs:
    """Call hook that records the hidden states that layers receive.

    All attributes are by path, in the order of the calls. For a layer that is called
    more than once they hold the last call.

    Attributes:
        rows: [T, K].
        experts: int [T], the expert of a mixture that each row is routed to.
        objects: the arrays as passed. Layers that share an input have the same object.
        called_again: layers that are called more than once.
    """

    rows: dict[str, mx.array] = field(default_factory=dict)
    experts: dict[str, mx.array] = field(default_factory=dict)
    objects: dict[str, mx.array] = field(default_factory=dict)
    called_again: set[str] = field(default_factory=set)

    def __call__(self, path: str, forward: Callable, x, *args, **kwargs) -> mx.array:
        if is_hidden(x):
            if path in self.objects:
                self.called_again.add(path)
            self.objects[path] = x
            experts = args[0] if args else None
            if experts is not None:
                # [..., 1, K] for each expert of a token, or one for all of them.
                x_rows = mx.broadcast_to(x.squeeze(-2), (*experts.shape, x.shape[-1]))
                self.experts[path] = experts.reshape(-1)
                self.rows[path] = x_rows.reshape(-1, x.shape[-1])
            else:
                self.rows[path] = x.reshape(-1, x.shape[-1])
        return forward(x, *args, **kwargs)

    def groups(self) -> list[list[str]]:
        """Paths of layers that share their input, in the order of the calls."""
        groups: dict[int, list[str]] = {}
        for path, value in self.objects.items():
            groups.setdefault(id(value), []).append(path)
        return list(groups.values())


@contextmanager
def capture_inputs(root: nn.Module, paths: list[str]) -> Iterator[CapturedInputs]:
    """Record the hidden states that the layers at `paths` receive."""
    captured = CapturedInputs()
    with hook_calls(root, paths, captured):
        yield captured


@contextmanager
def tokens_of_experts(
    root: nn.Module, paths: Iterable[str]
) -> Iterator[Callable[[str, CapturedInputs], mx.array]]:
    """A function of an expert layer and its captured inputs: the token of each row,
    int [T].

    mlx-lm sorts many rows by expert before it calls the layers at `paths`.
    """
    calls: dict[str, mx.array] = {}

    def remember(path: str, forward: Callable, x, indices, *args, **kwargs) -> mx.array:
        calls[path] = indices
        return forward(x, indices, *args, **kwargs)

    def tokens(path: str, captured: CapturedInputs) -> mx.array:
        indices = calls[path.rpartition(".")[0]]
        experts = indices.reshape(-1)
        order = mx.argsort(experts)
        if mx.array_equal(captured.experts[path], experts):
            order = mx.arange(len(experts))
        return order // indices.shape[-1]

    groups = sorted({path.rpartition(".")[0] for path in paths})
    with hook_calls(root, groups, remember):
        yield tokens


def override_inputs(
    root: nn.Module, inputs: dict[str, mx.array]
) -> AbstractContextManager[None]:
    """Call layers, by path, with these inputs instead of the ones they receive."""

    def override(path: str, forward: Callable, _, *args, **kwargs) -> mx.array:
        return forward(inputs[path], *args, **kwargs)

    return hook_calls(root, list(inputs), override)


def override_outputs(
    root: nn.Module, paths: list[str], transform: Callable[[mx.array], mx.array]
) -> AbstractContextManager[None]:
    """Pass the outputs of the layers at `paths` through `transform`."""

    def override(_, forward: Callable, *args, **kwargs) -> mx.array:
        return transform(forward(*args, **kwargs))

    return hook_calls(root, paths, override)


@dataclass
class GradientTap:
    """Call hook that records calls and adds shifts to outputs.

    The gradient with respect to a shift of zeros is the gradient with respect to the
    output of that call. Every attribute is by call: the path of a layer and how many
    calls of it came before, as an embedding may be the head too.

    Attributes:
        shifts: added to the outputs. A call without a shift is only recorded.
        inputs: token ids, or hidden states [..., K].
        experts: the expert of a mixture that each row is routed to.
        outputs: [..., N], before the shift.
        sources: the first call that received the same input array.
    """

    shifts: dict[str, mx.array] = field(default_factory=dict)
    inputs: dict[str, mx.array] = field(default_factory=dict)
    experts: dict[str, mx.array] = field(default_factory=dict)
    outputs: dict[str, mx.array] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def __call__(self, path: str, forward: Callable, x, *args, **kwargs) -> mx.array:
        call = f"{path}:{sum(path_of(other) == path for other in self.outputs)}"
        y = forward(x, *args, **kwargs)
        same = (other for other, value in self.inputs.items() if value is x)
        self.sources[call] = next(same, call)
        self.inputs[call], self.outputs[call] = x, y
        if args:
            self.experts[call] = args[0]
        return y + self.shifts[call].astype(y.dtype) if call in self.shifts else y


def path_of(call: str) -> str:
    """The path of the layer of a call."""
    return call.rpartition(":")[0]


def forward_with_hidden_states(
    model: nn.Module, tokens: mx.array, layer_ids: Sequence[int], **kwargs
) -> tuple[mx.array, mx.array]:
    """Logits [B, L, V], and the outputs of blocks side by side, [B, L, n * width].

    Args:
        tokens: int [B, L].
        layer_ids: n blocks, counted from 0, in ascending order.
        kwargs: passed to the model.
    """
    outputs = []

    def record(_, forward: Callable, *args, **kwargs) -> Any:
        outputs.append(forward(*args, **kwargs))
        return outputs[-1]

    prefix = find_blocks(model).prefix
    with hook_calls(model, [f"{prefix}{index}" for index in layer_ids], record):
        logits = model(tokens, **kwargs)
    return logits, mx.concatenate(outputs, axis=-1)


def require_hidden_states(
    model: nn.Module, layer_ids: Sequence[int], *, place: str
) -> int:
    """Check that the outputs of these blocks can be recorded; returns their width.

    Raises:
        UserError: the model has no list of blocks, or too few, or a block does not
            return one array [B, L, width].
    """
    blocks = find_blocks(model)
    if blocks is None:
        raise UserError(
            "this model has no list of blocks", place=place, hint=TARGET_HINT
        )
    count = len(blocks.trunk[blocks.name])
    if not layer_ids or min(layer_ids) < 0 or max(layer_ids) >= count:
        raise UserError(
            f"the target has blocks 0 to {count - 1}, the drafter reads {layer_ids}",
            place=place,
        )
    try:
        _, states = forward_with_hidden_states(
            model, mx.zeros((1, 3), mx.int32), layer_ids
        )
        ndim, length = states.ndim, states.shape[1]
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise UserError(
            f"the outputs of this model's blocks cannot be recorded: {error}",
            place=place,
            hint=TARGET_HINT,
        ) from error
    if ndim != 3 or length != 3:
        raise UserError(
            "a block of this model does not return one hidden state per token",
            place=place,
            hint=TARGET_HINT,
        )
    return states.shape[-1] // len(layer_ids)
