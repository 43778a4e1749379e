"""Quantized matrices of other formats as MLX's affine groups, without rounding."""

from dataclasses import dataclass, replace
from typing import ClassVar

import mlx.core as mx
import numpy as np

from ...errors import UserError
from ...quantization.bit_packing import pack_codes, unpack_codes

GROUP_SIZES = (128, 64, 32)


@dataclass(frozen=True)
class AffineGroups:
    """A quantized matrix [N, K]: weight = scale * code + bias, by row and group.

    Attributes:
        packed: uint32 [N, K * bits / 32], the codes as MLX packs them.
        scales, biases: [N, groups].
        group_index: the group of every column, int [K].
        experts: how many matrices are stacked in the rows; None = this is one matrix.
    """

    packed: mx.array
    scales: mx.array
    biases: mx.array
    group_index: np.ndarray
    bits: int
    experts: int | None = None
    mode: ClassVar[str] = "affine"

    @property
    def group_size(self) -> int | None:
        """The largest group size of MLX that divides all groups; None if none does."""
        for size in GROUP_SIZES:
            if len(self.group_index) % size == 0:
                runs = self.group_index.reshape(-1, size)
                if (runs == runs[:, :1]).all():
                    return size
        return None

    def tensors(self) -> dict[str, mx.array]:
        """The tensors of an MLX checkpoint; larger groups repeat their scales."""
        index = mx.array(self.group_index[:: self.group_size])
        scales, biases = self.scales[:, index], self.biases[:, index]
        tensors = {"weight": self.packed, "scales": scales, "biases": biases}
        if self.experts is None:
            return tensors
        return {k: v.reshape(self.experts, -1, v.shape[-1]) for k, v in tensors.items()}

    def permute_rows(self, order: np.ndarray) -> "AffineGroups":
        """The matrix with its rows in another order."""
        rows = mx.array(order)
        return replace(
            self,
            packed=self.packed[rows],
            scales=self.scales[rows],
            biases=self.biases[rows],
        )

    def permute_columns(self, order: np.ndarray) -> "AffineGroups":
        """The matrix with its columns in another order."""
        codes = unpack_codes(self.packed, self.bits)[:, mx.array(order)]
        return replace(
            self,
            packed=pack_codes(codes, self.bits),
            group_index=self.group_index[order],
        )


def from_zero_points(
    scales: mx.array, zero_points: mx.array
) -> tuple[mx.array, mx.array]:
    """Scales and biases [N, groups] of weight = (code - zero point) * scale.

    Both keep the dtype of the scales if it holds -zero point * scale exactly, as it
    does for a power of two. Else both are float32, which holds the product of a 16-bit
    scale and a zero point of up to 8 bits.
    """
    biases = -zero_points.astype(mx.float32) * scales.astype(mx.float32)
    return narrow_biases(scales, biases)


def narrow_biases(scales: mx.array, biases: mx.array) -> tuple[mx.array, mx.array]:
    """Scales and float32 biases, in the dtype of the scales if no bias changes."""
    narrow = biases.astype(scales.dtype)
    if mx.array_equal(narrow.astype(mx.float32), biases):
        return scales, narrow
    return scales.astype(mx.float32), biases


def require_tensor(tensors: dict[str, mx.array], layer: str, leaf: str) -> mx.array:
    """A tensor of a layer.

    Raises:
        UserError: the layer does not have it.
    """
    if leaf not in tensors:
        raise UserError(
            f"the tensor is missing, but {layer} has other tensors of a quantized "
            "layer",
            place=f"{layer}.{leaf}",
            hint="the checkpoint is incomplete, or its config names another format",
        )
    return tensors[leaf]


def require_shape(value: mx.array, shape: tuple[int, ...], name: str) -> None:
    """Refuse a tensor whose shape does not fit the other tensors of its layer.

    Raises:
        UserError: with the name and both shapes.
    """
    if value.shape != shape:
        raise UserError(
            f"the shape is {list(value.shape)}, but the other tensors of the layer and "
            f"the config require {list(shape)}",
            place=name,
            hint="the checkpoint is damaged, or its config belongs to another one",
        )
