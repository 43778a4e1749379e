"""The interface of post-training quantization methods.

A method is a class in `methods.METHODS`. A calibrated method is a `PTQMethod`: the
`SequentialPipeline` calls it for every block of the model.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from ...config.quant_spec import QuantSpec
from ...config.quantize import PTQConfig
from ...interfaces import SINGLE_PROCESS, Communicator, Logger
from ..packing import dequantize, pack
from .input_statistics import InputStatistics

if TYPE_CHECKING:
    from ...data.calibration import CalibrationBatch

Weights = dict[str, mx.array]


@dataclass(frozen=True)
class PTQContext:
    """A model to quantize.

    Attributes:
        model: its weights may be lazy (not yet read from disk).
        specs: quantization grid by path of each layer to quantize.
        dtype: dtype that the checkpoint stores.
        windows: returns at least this many calibration tokens, if the dataset has them.
        folder: where a method keeps its state. It is deleted once the checkpoint is
            written.
        reread: returns the same model with lazy weights. None = weights stay in memory.
        ranks: the processes that share the work. All see `folder` and have `model`.
    """

    model: nn.Module
    specs: dict[str, QuantSpec]
    dtype: mx.Dtype
    windows: Callable[[int], "CalibrationBatch"]
    folder: Path
    logger: Logger
    reread: Callable[[], nn.Module] | None = None
    ranks: Communicator = SINGLE_PROCESS

    def quantized_tensor(
        self, path: str, tensors: dict[str, mx.array]
    ) -> "QuantizedTensor":
        """Packed tensors of a layer with their dequantized weight."""
        weight = dequantize(tensors, self.specs[path], self.dtype)
        return QuantizedTensor(tensors, weight)

    def rtn(self, path: str, weight: mx.array) -> "QuantizedTensor":
        """Quantize the weight of a layer with RTN."""
        tensors = pack(weight, self.specs[path], self.dtype)
        return self.quantized_tensor(path, tensors)


@dataclass(frozen=True)
class QuantizedTensor:
    """The stored tensors of a quantized layer and its dequantized weight."""

    tensors: dict[str, mx.array]
    weight: mx.array


class PTQMethod(ABC):
    """Base class of calibrated quantization methods.

    Attributes:
        needs_cross_moments: run the full-precision stream too, at the cost of a second
            forward pass over some tokens. Without it statistics have no cross moments.
        weighs_embeddings: estimate the cost of errors in embeddings.
        weighs_outputs: estimate the Fisher information of layer outputs.
        max_compared_tokens: of the full-precision stream, if only cross moments need
            it.
        columns_at_once: columns of a row that are fitted together. None = all of them.
        max_fisher_tokens: with a forward and backward pass before the blocks, if all
            calibration tokens count alike.
    """

    needs_cross_moments = False
    weighs_embeddings = False
    weighs_outputs = False
    columns_at_once: int | None = None
    max_compared_tokens = 1 << 12
    max_fisher_tokens = 1 << 12

    def __init__(self, config: PTQConfig, context: PTQContext):
        self.config = config
        self.context = context

    @abstractmethod
    def quantize_group(
        self, weights: dict[str, mx.array], statistics: InputStatistics | None
    ) -> dict[str, QuantizedTensor]:
        """Quantize layers that share their input.

        Every process calls this with the same arguments and returns the same tensors.

        Args:
            weights: by path in the model.
            statistics: of their input. None if they receive no hidden states. The
                caller holds no reference to them, so a method may free them.
        """
