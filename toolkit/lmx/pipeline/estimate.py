"""What a stage needs of a machine, from the shapes of its model; see `Stage.estimate`.

Stages that train count here what they have in common.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
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
from ..quantization.target_layers import QuantizationPlan, select_layers
from .work import Work

# The numbers of all estimates. They are counted in the code that each names; tests
# compare the sums with measured peaks (tests/pipeline/test_estimates.py).
# training/chunked_loss.py: chunks whose buffers exist at once.
CHUNKS_AT_ONCE = 3
# Bytes of a logit with its exponential and its gradient: on a GPU, and on the CPU,
# where every step of the computation leaves an array.
LOGIT_BYTES = (16, 28)
# training/chunked_loss.py: bytes of a weight of the head, for its gradient and its sum.
CHUNKED_HEAD_BYTES = 8
# MLX's CPU backend allocates the results of about so many operations before it computes
# them: matrices whose dequantized weights exist at once.
DEQUANTIZED_AT_ONCE = 8
# training/optimizers.py: bytes of a trained parameter's moments; 4 of the other
# optimizers. With 8 bits, a block of 256 values has a float32 scale.
MOMENT_BYTES = {
    "adamw": 8,
    "adamw_8bit": 2 + 8 / 256,
    "lion_8bit": 1 + 4 / 256,
    "adafactor": 0,
}
# Bytes of a trained parameter in float32: its gradient and AdamW's moments, or, in a
# checkpoint, the parameter and these moments.
ADAMW_BYTES = 12
# training/step.py: bytes of a trained parameter in an update.
UPDATE_BYTES = 8
# quantization/ptq/gptq: float32 arrays as large as the rows that are solved at once,
# matrices of a Hessian and its factors, and predictions of two models.
SOLVER_ARRAYS, HESSIANS, PREDICTION_ARRAYS = 12, 8, 6
# Positions of the predictions in a calibration.
PREDICTED = 128
# Evaluations of scale tuning, with those that compare learning rates.
TUNING_EVALUATIONS = 9
# quantization/mixed_precision: compared plans, and solved grids of a weight.
PLANS, GRIDS = 6, 16
# evaluation/latency.py: generations of a measurement.
LATENCY_RUNS = 14


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
        """The shape in the headers of a checkpoint's files.

        Raises:
            UserError: the files are damaged.
        """
        size = checkpoint_size(folder)
        is_quantized = "quantization" in config
        return cls(config, size.bytes, size.float_values if is_quantized else None)

    @classmethod
    def of_config(cls, config: dict) -> "ModelShape":
        """A model that has no files yet."""
        shape = cls(config, 0)
        return cls(config, shape.dtype.size * shape.parameters)

    def model(self) -> nn.Module:
        """A model of these shapes; its weights are never computed."""
        return build_model(self.config)

    @property
    def is_quantized(self) -> bool:
        """Whether it is stored as codes."""
        return self.float_values is not None

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype that its config names; transformers 5 calls it `dtype`."""
        config = self.config
        name = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
        return getattr(mx, name, mx.bfloat16)

    @cached_property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(v.size for _, v in tree_flatten(self.model().parameters()))

    @cached_property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Shapes [..., out, in] by name."""
        named = tree_flatten(self.model().parameters())
        return {name: value.shape for name, value in named if value.ndim > 1}

    @cached_property
    def active(self) -> list[tuple[tuple[int, ...], float]]:
        """Every matrix that tokens are multiplied with, and the share of its experts
        that a token sees."""
        has_head = any("lm_head" in name for name in self.matrices)
        experts = self.setting("num_experts_per_tok")
        return [
            (size, experts / size[0] if experts and len(size) == 3 else 1.0)
            for name, size in self.matrices.items()
            if not (has_head and "embed" in name)
        ]

    @property
    def active_weights(self) -> float:
        """Weights that a token is multiplied with."""
        return sum(prod(size) * share for size, share in self.active)

    @property
    def inputs_and_outputs(self) -> float:
        """Values of a token that go into and come out of all matrices."""
        return sum(
            (size[-1] + size[-2]) * (share * size[0] if len(size) == 3 else 1)
            for size, share in self.active
        )

    def setting(self, name: str) -> int:
        """An integer of the config, of its language part if it has several; else 0."""
        return config_int(self.config, name)

    def selection(self, quantization: ConfigModel) -> QuantizationPlan:
        """The layers that a quantization block quantizes, and those it leaves."""
        return select_layers(self.model(), quantization)

    def quantized(self, specs: dict[str, QuantSpec]) -> "ModelShape":
        """The model with these layers quantized; the others keep their dtype."""
        float_values, bits = self.parameters, 8 * self.bytes
        for path, spec in specs.items():
            shape = self.matrices[f"{path}.weight"]
            size, width = prod(shape), 32.0
            grids = size
            if spec.stored is not None:
                width = spec.bits + spec.scale_bits / spec.group_size
                grids = 2 * size // spec.group_size if spec.scale_bits > 8 else 0
            if spec.global_scale:
                bits += 32 * shape[0]
                grids += shape[0]
            bits += size * (width - 8 * self.bytes / self.parameters)
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
        lengths: padded lengths in tokens of a sample of the training examples.
        max_seq_length: of the data block.
        examples: training examples; 0 = unknown.
        find: the path of a file that the recipe names; None if there is none.
        tensor: processes that hold a model together, in stages that can.
    """

    shape: ModelShape
    lengths: list[int]
    max_seq_length: int
    examples: float
    find: Callable[[str], Path | None]
    tensor: int = 1

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
class Estimate:
    """What a stage needs of the machine.

    Attributes:
        model: the checkpoint that the next stage begins with.
        parts: bytes of memory by part.
        disk: bytes that the stage writes.
        work: all that takes time; None = unknown before the data is read.
        dtype: the dtype it computes in.
        training: cost of its training, if it trains.
        steps: optimizer steps.
        remedies: overrides of the recipe that need less memory.
        data: what it generates, as text.
    """

    model: ModelShape
    parts: dict[str, int] = field(default_factory=dict)
    disk: int = 0
    work: Work | None = field(default_factory=Work)
    dtype: mx.Dtype = mx.float32
    training: TrainingCost | None = None
    steps: int | None = None
    remedies: tuple[str, ...] = ()
    data: str = ""

    @property
    def memory(self) -> int:
        """Bytes of memory."""
        return int(sum(self.parts.values()))

    @property
    def seconds(self) -> float | None:
        """The time on this machine; None if the work is unknown."""
        return None if self.work is None else self.work.seconds(self.dtype)


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
