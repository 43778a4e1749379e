"""Tensor parallelism: every process holds a part of every layer of one model.

mlx-lm's architectures divide their blocks (`Model.shard`): heads of attention, and
hidden units of the MLP or of every expert. A block sums the outputs of its parts twice,
as Megatron does (arXiv 1909.08053). Here the embedding and the LM head are divided
along the vocabulary too, as most weights of a small model are theirs. What mlx-lm
divides by layers only is left to `pipeline_parallel`.
"""

import traceback
import warnings
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .. import cpu
from ..errors import UserError
from ..interfaces import Communicator
from . import global_scale
from .hooks import put_in_front
from .pipeline_parallel import (
    Place,
    can_divide_by_layers,
    divide_by_layers,
    largest_share,
    layers_by_rank,
)
from .quantized_layers import has_quantized_inputs

# What architectures raise for counts that they cannot divide.
INDIVISIBLE = (ValueError, AssertionError, ArithmeticError)
# Numbers of processes that an error message may name.
MAX_NAMED = 16
EMBEDDING, HEAD = "embed_tokens", "lm_head"
# Of mlx-lm's architectures with `shard`, those that no test compares with one process.
UNCHECKED = ("deepseek_v41", "kimi_k3", "minimax_m3_vl", "muse_spark")


def shard(
    model: nn.Module, group: Communicator, reread: Callable[[], nn.Module]
) -> None:
    """Keep this rank's part of a model, in place. Weights may be unread, and stay so.

    If mlx-lm divides the model by layers only, the part is some of them.

    Args:
        reread: loads the whole model again, unread.

    Raises:
        UserError: the architecture or a layer cannot be divided, or not by this number.
    """
    _require_divisible_kind(model)
    if group.is_first and (name := architecture(model)) in UNCHECKED:
        warnings.warn(
            f"no test of lmx compares {name} in several processes with one; check its "
            "output",
            stacklevel=2,
        )
    has_layers_only = can_divide_by_layers(model)
    if has_layers_only and group.is_first:
        warnings.warn(
            f"mlx-lm divides {architecture(model)} by layers only: every process holds "
            "some of them, which saves memory, but no time",
            stacklevel=2,
        )
    try:
        if has_layers_only:
            divide_by_layers(model, group)
        else:
            _divide(model, group.group)
    except INDIVISIBLE as error:
        possible = [n for n in range(2, MAX_NAMED + 1) if _can_divide(reread(), n)]
        refusal = _indivisible(model, group.size, error)
        names = ", ".join(map(str, possible))
        refusal.hint = f"possible are {names}" if possible else "use one process"
        raise refusal from error
    cpu.enable(model)
    if has_layers_only:
        return
    for module, kind in _vocabulary_layers(model, group.size):
        rows = len(module.weight) // group.size
        part = slice(group.rank * rows, (group.rank + 1) * rows)
        for key, value in module.parameters().items():
            module[key] = mx.contiguous(value[part])
        put_in_front(kind, module)
        module.group, module.first_row = group, part.start


def architecture(model: nn.Module) -> str:
    """The name of mlx-lm's module of a model."""
    return type(model).__module__.rpartition(".")[2]


def _require_divisible_kind(model: nn.Module) -> None:
    """Refuse what MLX would divide wrongly, or not at all.

    Raises:
        UserError: naming it.
    """
    if can_divide_by_layers(model):
        return
    if not hasattr(model, "shard"):
        raise UserError(
            f"mlx-lm cannot divide models of type {model.model_type} among processes",
            hint="use one process, or a smaller quantization of the model",
        )
    # MLX's sharded layers multiply inputs as they are.
    if has_quantized_inputs(model):
        raise UserError("layers with quantized inputs cannot be divided")
    if any(global_scale.NAME in module for _, module in model.named_modules()):
        raise UserError("experts with a global scale cannot be divided")


def _divide(model: nn.Module, place: Place | mx.distributed.Group) -> None:
    """Call `model.shard`, and check that everything was divided without a rest.

    Raises:
        ValueError: naming what was not; or what MLX raises.
    """
    size = place.size()
    numbers, shapes = _numbers(model), _shapes(model)
    model.shard(place)
    for name, number in sorted(_numbers(model).items()):
        before = numbers.get(name, number)
        if number not in (before, before / size):
            raise ValueError(f"{name} is {before}")
    after = _shapes(model)
    if after.keys() != shapes.keys():
        raise ValueError("it has other parameters")
    for name, shape in sorted(after.items()):
        pairs = [
            pair for pair in zip(shape, shapes[name], strict=True) if len({*pair}) > 1
        ]
        if len(pairs) > 1 or any(part * size != whole for part, whole in pairs):
            raise ValueError(f"the shape of {name} is {shapes[name]}")


def _can_divide(model: nn.Module, size: int) -> bool:
    try:
        if can_divide_by_layers(model):
            layers_by_rank(model, size)
        else:
            _divide(model, Place(0, size))
    except INDIVISIBLE:
        return False
    return True


def _indivisible(model: nn.Module, size: int, error: Exception) -> UserError:
    # The path of the layer that MLX could not divide.
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    failed = [id(values["module"]) for values in frames if "module" in values]
    paths = [path for path, module in model.named_modules() if id(module) in failed]
    layer = f"{paths[0]}: " if paths else ""
    return UserError(
        f"the model cannot be divided among {size} processes: {layer}{error}"
    )


def _numbers(model: nn.Module) -> dict[str, int]:
    """The whole numbers that modules have as attributes, such as counts of heads."""
    return {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is int
    }


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: value.shape for name, value in tree_flatten(model.parameters())}


def shard_share(model: nn.Module, size: int) -> float:
    """The share of the weights that each of `size` processes holds, at most.

    From shapes alone; the model is divided, and never computed.

    Raises:
        UserError: the architecture or a layer cannot be divided, or not by this number.
    """
    _require_divisible_kind(model)
    whole = sum(value.size for _, value in tree_flatten(model.parameters()))
    try:
        if can_divide_by_layers(model):
            return largest_share(model, size)
        _divide(model, Place(0, size))
    except INDIVISIBLE as error:
        raise _indivisible(model, size, error) from error
    held = sum(value.size for _, value in tree_flatten(model.parameters()))
    for module, _ in _vocabulary_layers(model, size):
        rows = sum(value.size for value in module.parameters().values())
        held -= rows - rows // size
    return held / whole


def _vocabulary_layers(model: nn.Module, size: int) -> list[tuple[nn.Module, type]]:
    """Embedding and LM head, if `size` divides them, and what they become."""
    layers: list[tuple[nn.Module, type]] = []
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if name == EMBEDDING and isinstance(
            module, nn.Embedding | nn.QuantizedEmbedding
        ):
            layers.append((module, VocabParallelEmbedding))
        elif name == HEAD and isinstance(module, nn.Linear | nn.QuantizedLinear):
            layers.append((module, VocabParallelHead))
    return [(m, kind) for m, kind in layers if len(m.weight) % size == 0]


class VocabParallel:
    """A class in front of a layer's, whose weight has the rows of some tokens."""

    group: Communicator
    first_row: int

    def _all_logits(self, logits: mx.array) -> mx.array:
        """The logits [..., V] from those of this rank's tokens [..., V / N]."""
        # Gathered along the first axis.
        gathered = self.group.all_gather(mx.contiguous(logits.moveaxis(-1, 0)))
        return gathered.moveaxis(0, -1)


class VocabParallelEmbedding(VocabParallel):
    """An embedding, which may be the LM head too. The sum over ranks is exact: all but
    one of its terms are zero."""

    def __call__(self, tokens: mx.array) -> mx.array:
        rows = tokens.astype(mx.int32) - self.first_row
        is_here = (rows >= 0) & (rows < len(self.weight))
        values = super().__call__(mx.where(is_here, rows, 0))
        values = mx.where(is_here[..., None], values, mx.zeros_like(values))
        return mx.distributed.all_sum(values, group=self.group.group)

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits of all tokens."""
        return self._all_logits(super().as_linear(x))


class VocabParallelHead(VocabParallel):
    """An LM head."""

    def __call__(self, x: mx.array) -> mx.array:
        return self._all_logits(super().__call__(x))
