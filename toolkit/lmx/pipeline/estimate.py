"""What a stage needs of a machine, from the shapes of its model; see `Stage.estimate`.

The constants of estimates are counted in the code that each names; tests compare the
sums with measured peaks (tests/pipeline/test_estimates.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import NamedTuple

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

# Bytes of a logit with its exponential and its gradient: on a GPU, and on the CPU,
# where every step of the computation leaves an array.
LOGIT_BYTES = (16, 28)
# training/chunked_loss.py: chunks whose buffers exist at once.
CHUNKS_AT_ONCE = 3
# Bytes of a trained parameter in float32: its gradient and AdamW's moments, or, in a
# checkpoint, the parameter and these moments.
ADAMW_BYTES = 12


@dataclass(frozen=True)
class ModelShape:
    """A model's architecture and size, without its weights.

    Attributes:
        config: its config.json.
        bytes: its size on disk.
        float_values: stored floating-point values of a quantized model: parameters that
            are not quantized, and affine scales and biases; None = not quantized.
        specs: grids of its quantized layers, by path.
    """

    config: dict
    bytes: int
    float_values: int | None = None
    specs: dict[str, QuantSpec] = field(default_factory=dict)

    @classmethod
    def of_folder(cls, folder: Path, config: dict) -> "ModelShape":
        """The shape in the headers of a checkpoint's files.

        Raises:
            UserError: the files are damaged.
        """
        size = checkpoint_size(folder)
        if "quantization" not in config:
            return cls(config, size.bytes)
        # Not validated: MLX has grids that lmx does not train, such as 1 bit.
        specs = {
            path: QuantSpec.model_construct(
                bits=grid["bits"],
                group_size=grid["group_size"],
                mode=grid.get("mode", "affine"),
            )
            for path, grid in size.grids.items()
        }
        return cls(config, size.bytes, size.float_values, specs)

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
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        named = tree_flatten(self.model().parameters())
        return {name: value.shape for name, value in named}

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(map(prod, self._shapes.values()))

    @property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Shapes [..., out, in] by name."""
        return {name: size for name, size in self._shapes.items() if len(size) > 1}

    @cached_property
    def per_token(self) -> tuple[float, float]:
        """Weights that a token is multiplied with, and values of a token that go into
        and come out of all matrices."""
        matrices, experts = self.matrices, self.setting("num_experts_per_tok")
        has_head = any("lm_head" in name for name in matrices)
        weights = values = 0
        for name, (*stacked, rows, columns) in matrices.items():
            if has_head and "embed" in name:
                continue
            seen = experts if experts and len(stacked) == 1 else prod(stacked)
            weights += seen * rows * columns
            values += seen * (rows + columns)
        return weights, values

    def setting(self, name: str) -> int:
        """An integer of the config, of its language part if it has several; else 0."""
        return config_int(self.config, name)

    def selection(self, quantization: ConfigModel) -> QuantizationPlan:
        """The layers that a quantization block quantizes, and those it leaves."""
        return select_layers(self.model(), quantization)

    def quantized(self, specs: dict[str, QuantSpec]) -> "ModelShape":
        """The model with these layers quantized; the others keep their dtype."""
        matrices, parameters = self.matrices, self.parameters
        float_values, bits = parameters, 8 * self.bytes
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
            bits += size * (width - 8 * self.bytes / parameters)
            float_values += grids - size
        return replace(
            self, bytes=int(bits / 8), float_values=float_values, specs=specs
        )


class BatchShape(NamedTuple):
    """A batch: tokens of its longest sequence, most tokens, and tokens on average."""

    length: int
    tokens: int
    mean_tokens: float


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
        valid_tokens: of the validation examples; None = unknown.
    """

    shape: ModelShape
    lengths: list[int]
    max_seq_length: int
    examples: float
    find: Callable[[str], Path | None]
    tensor: int = 1
    valid_tokens: float | None = None

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
        parameters: of the model that it trains, of which it trains `trained`.
        steps: optimizer steps.
        epochs: passes over the training examples; None = not known.
        remedies: overrides of the recipe that need less memory.
        data: what it generates, as text.
    """

    model: ModelShape
    parts: dict[str, int] = field(default_factory=dict)
    disk: int = 0
    work: Work | None = field(default_factory=Work)
    dtype: mx.Dtype = mx.float32
    parameters: int = 0
    trained: int = 0
    steps: int | None = None
    epochs: float | None = None
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
