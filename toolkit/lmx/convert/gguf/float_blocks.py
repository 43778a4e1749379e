"""ggml's MXFP4 and NVFP4 blocks as MLX's groups of the same modes and back.

Both have codes of 4 bits (E2M1) and one byte for the scale of a group: E8M0 for 32
weights in MXFP4, E4M3 for each of four times 16 weights in a block of NVFP4. ggml
doubles the values of the codes and halves those of the scales. A byte of codes has
those of the first half of a group in its low bits, of the second half in its high bits;
MLX packs neighbours.
"""

import math
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ...config.quant_spec import FLOAT_MODES
from ...models import global_scale
from ...quantization.bit_packing import pack_codes, unpack_codes
from .k_blocks import nibbles
from .reader import GGUFTensor

# MLX's mode, and the groups of a block.
TYPES = {"MXFP4": ("mxfp4", 1), "NVFP4": ("nvfp4", 4)}
BY_MODE = {mode: (name, groups) for name, (mode, groups) in TYPES.items()}


@dataclass(frozen=True)
class FloatGroups:
    """A quantized matrix [..., N, K], or those of all experts, in a mode of MLX.

    Attributes:
        packed: uint32 [..., N, K / 8], the codes as MLX packs them.
        scales: uint8 [..., N, groups].
    """

    packed: mx.array
    scales: mx.array
    mode: str

    @property
    def group_size(self) -> int:
        return FLOAT_MODES[self.mode][0]

    @property
    def bits(self) -> int:
        return FLOAT_MODES[self.mode][1]

    def tensors(self) -> dict[str, mx.array]:
        """The tensors of an MLX checkpoint."""
        return {"weight": self.packed, "scales": self.scales}

    def permute_rows(self, order: np.ndarray) -> "FloatGroups":
        """The matrix with its rows in another order."""
        rows = mx.array(order)
        return replace(self, packed=self.packed[rows], scales=self.scales[rows])


def to_groups(tensor: GGUFTensor) -> FloatGroups | None:
    """The matrices of a tensor; None for a type without such groups."""
    if tensor.ggml_type not in TYPES:
        return None
    mode, groups = TYPES[tensor.ggml_type]
    rows, width = tensor.shape[:-1], tensor.shape[-1]
    bytes_of_codes = tensor.blocks[..., groups:]
    codes = nibbles(bytes_of_codes.reshape(-1, bytes_of_codes.shape[-1] // groups))
    packed = pack_codes(mx.array(codes.reshape(math.prod(rows), width)), 4)
    scales = mx.array(np.ascontiguousarray(tensor.blocks[..., :groups]))
    mx.eval(packed)
    return FloatGroups(packed.reshape(*rows, -1), scales.reshape(*rows, -1), mode)


def from_groups(parts: dict[str, mx.array], mode: str) -> tuple[str, np.ndarray] | None:
    """ggml's type and the bytes [..., rows, bytes of a row] of a quantized matrix.

    Args:
        parts: weight (codes) and scales, as MLX stores them.

    Returns:
        None if ggml has no such blocks: of the mode, of a row of this width, or with a
        scale for the whole matrix.
    """
    ggml_type, groups = BY_MODE.get(mode, (None, 1))
    scales = np.array(parts["scales"])
    has_global_scale = parts.get(global_scale.NAME) is not None
    if ggml_type is None or has_global_scale or scales.shape[-1] % groups:
        return None
    packed = parts["weight"].reshape(-1, parts["weight"].shape[-1])
    codes = np.array(unpack_codes(packed, 4).astype(mx.uint8))
    codes = codes.reshape(*scales.shape, 2, -1)
    halves = codes[..., 0, :] | codes[..., 1, :] << 4
    blocks = (*scales.shape[:-1], scales.shape[-1] // groups, -1)
    joined = np.concatenate([scales.reshape(blocks), halves.reshape(blocks)], axis=-1)
    return ggml_type, joined.reshape(*scales.shape[:-1], -1)
