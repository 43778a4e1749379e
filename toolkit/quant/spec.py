"""What a quantized layer is: bits, group size, mode; one object for all who round."""

from typing import Literal

import mlx.core as mx
from pydantic import model_validator

from ..section import Section

Mode = Literal["affine", "mxfp4", "nvfp4", "mxfp8"]

# MLX's floating-point modes have one group size and one width each.
FIXED_MODES = {"mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}


class QuantSpec(Section):
    """Bits, group size and mode of a quantized weight, as MLX stores it."""

    bits: Literal[2, 3, 4, 5, 6, 8] | None = None
    """Bits per code. Affine: 2, 3, 4, 5, 6 or 8 (default 4); other modes fix it."""
    group_size: Literal[16, 32, 64, 128] | None = None
    """Weights that share a scale. Affine: 32, 64 or 128 (default 64)."""
    mode: Mode = "affine"
    """affine (scale and bias), or the floating-point modes mxfp4, nvfp4, mxfp8."""

    @model_validator(mode="after")
    def _complete(self):
        group_size, bits = FIXED_MODES.get(self.mode, (64, 4))
        if self.mode == "affine":
            if self.group_size == 16:
                raise ValueError("affine groups are 32, 64 or 128 weights, not 16")
        elif (self.group_size or group_size, self.bits or bits) != (group_size, bits):
            raise ValueError(
                f"{self.mode} has groups of {group_size} and {bits} bits; "
                "leave bits and group_size out"
            )
        object.__setattr__(self, "bits", self.bits or bits)
        object.__setattr__(self, "group_size", self.group_size or group_size)
        return self

    def fits(self, width: int) -> bool:
        """Whether rows of `width` weights divide into this spec's groups."""
        return width % self.group_size == 0


class Quantization(QuantSpec):
    """A grid, and whether it is for the embedding and the head too."""

    embeddings: bool = True
    """Round the embedding (and, when tied, the output head) too."""
    head: bool = True
    """Round the output head too, where it has weights of its own."""


def pack(weight: mx.array, spec: QuantSpec, dtype: mx.Dtype) -> dict[str, mx.array]:
    """Round a weight [..., K] to the nearest points of MLX's own grid.

    Args:
        dtype: the type the checkpoint stores; the weight is cast to it first, because
            rounding another type gives other codes.

    Returns:
        What a checkpoint stores: weight (codes), scales and, if affine, biases.
    """
    tensors = mx.quantize(
        weight.astype(dtype),
        group_size=spec.group_size,
        bits=spec.bits,
        mode=spec.mode,
    )
    return dict(zip(("weight", "scales", "biases"), tensors, strict=False))


def expand(tensors: dict[str, mx.array], spec: QuantSpec, dtype: mx.Dtype) -> mx.array:
    """The weight [..., K] that packed tensors stand for, in the type they store."""
    return mx.dequantize(
        tensors["weight"],
        tensors["scales"],
        tensors.get("biases"),
        group_size=spec.group_size,
        bits=spec.bits,
        mode=spec.mode,
        dtype=dtype,
    )
