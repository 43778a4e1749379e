"""What stages need of a machine, from shapes alone; `Stage.resources` has it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..config.base import ConfigModel
from ..config.quant_spec import QuantSpec
from ..cpu import on_cpu
from ..models.checkpoint import checkpoint_size, config_int
from ..models.loader import build_model
from ..models.tensor_parallel import shard_share
from ..quantization.target_layers import QuantizationPlan, select_layers
from .parallel_cost import Traffic
from .work import Work

# Chunks of the loss whose buffers exist at once.
CHUNKS_AT_ONCE = 3
# Per logit, with its exponential and its gradient: on a GPU, and on the CPU, where
# every step of the computation leaves an array.
LOGIT_BYTES = (16, 28)


@dataclass(frozen=True)
class ModelShape:
    """A model's architecture and size, without its weights.

    Attributes:
        config: its config.json.
        bytes: its size on disk.
        float_values: stored floating-point values of a quantized model: parameters that
            are not quantized, and affine scales and biases; None = not quantized.
    """

    config: dict
    bytes: int
    float_values: int | None = None

    @classmethod
    def of_folder(cls, folder: Path, config: dict) -> "ModelShape":
        """From the headers of a checkpoint's files; UserError if they are damaged."""
        size = checkpoint_size(folder)
        is_quantized = "quantization" in config
        return cls(config, size.bytes, size.float_values if is_quantized else None)

    def model(self) -> nn.Module:
        """A model of these shapes; its weights are never computed."""
        return build_model(self.config)

    @property
    def is_quantized(self) -> bool:
        """Whether it is stored as codes."""
        return self.float_values is not None

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return _count(self.model().parameters())

    @property
    def experts(self) -> int:
        """Experts of a mixture that a token sees, else 0."""
        return self.setting("num_experts_per_tok")

    def setting(self, name: str) -> int:
        """An integer of the config, of its language part if it has several; else 0."""
        return config_int(self.config, name)

    def selection(self, quantization: ConfigModel) -> QuantizationPlan:
        """The layers that a quantization block quantizes, and those it leaves."""
        return select_layers(self.model(), quantization)

    def quantized(self, specs: dict[str, QuantSpec]) -> "ModelShape":
        """The model with these layers quantized; the others keep their dtype."""
        model = self.model()
        matrices = matrix_shapes(model)
        total = float_values = _count(model.parameters())
        bits = 8 * self.bytes
        for path, spec in specs.items():
            shape = matrices[f"{path}.weight"]
            size, width = prod(shape), 32.0
            grids = size
            if spec.stored is not None:
                width = spec.bits + spec.scale_bits / spec.group_size
                grids = 2 * size // spec.group_size if spec.scale_bits > 8 else 0
            if spec.global_scale:
                bits += 32 * shape[0]
                grids += shape[0]
            bits += size * (width - 8 * self.bytes / total)
            float_values += grids - size
        return replace(self, bytes=int(bits / 8), float_values=float_values)


@dataclass(frozen=True)
class BatchShape:
    """A batch: tokens of its longest sequence, most tokens, and tokens on average."""

    length: int
    tokens: int
    mean_tokens: float


@dataclass(frozen=True)
class TrainingCost:
    """Cost of a training: parameters, bytes of memory by part, work of a step."""

    parameters: int
    trained: int
    memory: dict[str, int]
    step: Work


@dataclass(frozen=True)
class Workload:
    """The model and the data that stages are estimated for.

    Attributes:
        shape: the recipe's model.
        dtype: the dtype its checkpoint stores.
        lengths: padded lengths in tokens of a sample of the training examples.
        max_seq_length: of the data block.
        examples: training examples; 0 = unknown.
        find: the path of a file that the recipe names; None if there is none.
        tensor: processes that hold a model together, in stages that can.
    """

    shape: ModelShape
    dtype: mx.Dtype
    lengths: list[int]
    max_seq_length: int
    examples: float
    find: Callable[[str], Path | None]
    tensor: int = 1

    @property
    def held_share(self) -> float:
        """The share of a model that a process holds.

        Raises:
            UserError: the processes cannot divide the model.
        """
        if self.tensor == 1:
            return 1.0
        return shard_share(self.shape.model(), self.tensor)

    @property
    def longest(self) -> int:
        """Tokens of the longest example."""
        return max(self.lengths)

    @property
    def mean_length(self) -> float:
        """Tokens of an example on average."""
        return sum(self.lengths) / len(self.lengths)

    def largest_batch(self, batch_size: int | None, batch_tokens: int | None) -> int:
        """Tokens of the largest batch: few examples make a smaller one."""
        # The longest examples are joined by shorter ones.
        sizes = {n: batch_size or max(1, batch_tokens // n) for n in self.lengths}
        return max(n * min(size, self.examples or size) for n, size in sizes.items())


@dataclass(frozen=True)
class StageResources:
    """What a stage needs of the machine.

    Attributes:
        model: the checkpoint that the next stage begins with.
        disk: bytes that the stage writes.
        dtype: the dtype it computes in.
        training: cost of its training, if it trains.
        steps: optimizer steps; None = unknown before the data is read.
        batch_key: the key of the stage's block that sets the size of its batches.
        remedies: overrides of the recipe that need less memory.
        other_memory: bytes by part, if it does not train.
        work: besides training.
        data: what it generates, as text.
        traffic: what each of several processes exchanges in a training step.
    """

    model: ModelShape
    disk: int = 0
    dtype: mx.Dtype = mx.float32
    training: TrainingCost | None = None
    steps: int | None = None
    batch_key: str = ""
    remedies: tuple[str, ...] = ()
    other_memory: dict[str, int] = field(default_factory=dict)
    work: Work = field(default_factory=Work)
    data: str = ""
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of memory by part."""
        return self.training.memory if self.training else self.other_memory

    @property
    def memory(self) -> int:
        """Bytes of memory."""
        return int(sum(self.parts.values()))

    @property
    def seconds(self) -> float | None:
        """The time on this machine; None if the number of steps is unknown."""
        work = self.work
        if self.training:
            if self.steps is None:
                return None
            work += self.training.step * self.steps
        return work.seconds(self.dtype)


def config_dtype(config: dict) -> mx.Dtype:
    """The dtype that a config.json names; transformers 5 calls it `dtype`."""
    name = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    return getattr(mx, name, mx.bfloat16)


def _count(parameters: dict) -> int:
    return sum(value.size for _, value in tree_flatten(parameters))


def matrix_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes [..., out, in] by name."""
    named = tree_flatten(model.parameters())
    return {name: value.shape for name, value in named if value.ndim > 1}


def _active(experts: int, matrices: dict) -> list[tuple[tuple[int, ...], float]]:
    """Every matrix that tokens are multiplied with, and the share of tokens it sees.

    Args:
        experts: of a mixture, that a token sees; 0 = all.
    """
    has_head = any("lm_head" in name for name in matrices)
    return [
        (size, experts / size[0] if experts and len(size) == 3 else 1.0)
        for name, size in matrices.items()
        if not (has_head and "embed" in name)
    ]


def active_weights(experts: int, matrices: dict) -> float:
    """Weights that a token is multiplied with, see `_active`."""
    return sum(prod(size) * share for size, share in _active(experts, matrices))


def inputs_and_outputs(experts: int, matrices: dict) -> float:
    """Values per token that go into and come out of all matrices, see `_active`."""
    return sum(
        (size[-1] + size[-2]) * (share * size[0] if len(size) == 3 else 1)
        for size, share in _active(experts, matrices)
    )


def logit_bytes(vocabulary: int, tokens: int, chunk: int | None = None) -> int:
    """Bytes of logits with their exponentials and gradients.

    Args:
        chunk: tokens whose logits are computed at once; None = all.
    """
    at_once = min(tokens, CHUNKS_AT_ONCE * (chunk or tokens))
    return LOGIT_BYTES[on_cpu()] * vocabulary * at_once


def training_dtype(name: str, stored: mx.Dtype) -> mx.Dtype:
    """The type to compute in.

    "auto" is bfloat16 for a bfloat16 checkpoint on a GPU, else float32: float16 would
    lose small gradients, and bfloat16 the digits that a float16 checkpoint is served
    with.
    """
    if name != "auto":
        return getattr(mx, name)
    return mx.bfloat16 if stored == mx.bfloat16 and not on_cpu() else mx.float32
