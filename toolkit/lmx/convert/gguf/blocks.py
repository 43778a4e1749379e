"""ggml's blocks as MLX's groups and back, code by code, without requantization.

A block starts with d (float16). 32 weights share a scale: Q4_0, Q5_0 and Q8_0 are d *
(code - middle); Q4_1 and Q5_1 are d * code + m. Blocks of Q4_K and Q5_K have eight such
groups, d * scale * code - m * minimum, with 6-bit scales and minima, and float32 holds
the products exactly. All other types, whose groups MLX does not have, become dense
float32 as the package `gguf` dequantizes them; it holds the d * scale * (code - middle)
of Q3_K and Q6_K exactly.

MXFP4 and NVFP4 have codes of 4 bits (E2M1) and one byte for the scale of a group: E8M0
for 32 weights in MXFP4, E4M3 for each of four times 16 weights in a block of NVFP4.
ggml doubles the values of the codes and halves those of the scales. A byte of codes has
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
from ..importers.affine_repack import AffineGroups, narrow_biases
from . import k_blocks
from .k_blocks import float16_at, nibbles
from .reader import GGUFTensor

BLOCK = 32
# ggml's types for codes of so many bits: symmetric, and with a minimum. Codes of 2 and
# 3 bits are stored as codes of 4 bits.
TYPES_BY_BITS = {
    2: (None, "Q4_1"),
    3: (None, "Q4_1"),
    4: ("Q4_0", "Q4_1"),
    5: ("Q5_0", "Q5_1"),
    8: ("Q8_0", None),
}
# Bits of the codes of the types with groups of 32.
GROUPED_TYPES = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8}
GROUPED_TYPES |= {"Q4_K": 4, "Q5_K": 5}
# MLX's mode of the floating-point types, and the groups of a block.
FLOAT_TYPES = {"MXFP4": ("mxfp4", 1), "NVFP4": ("nvfp4", 4)}
FLOAT_TYPES_BY_MODE = {
    mode: (name, groups) for name, (mode, groups) in FLOAT_TYPES.items()
}


def to_affine_groups(tensor: GGUFTensor) -> AffineGroups | None:
    """A quantized matrix, or those of all experts, in groups of 32; None for a type
    without such groups."""
    if tensor.ggml_type not in GROUPED_TYPES:
        return None
    bits = GROUPED_TYPES[tensor.ggml_type]
    stored, has_minimum = tensor.blocks, tensor.ggml_type.endswith("_1")
    if tensor.ggml_type == "Q4_K":
        codes, scales, biases = k_blocks.q4_k(stored)
    elif tensor.ggml_type == "Q5_K":
        codes, scales, biases = k_blocks.q5_k(stored)
    else:
        # d, m if the type ends with 1, codes.
        scales, start = float16_at(stored, 0), 4 if has_minimum else 2
        if bits == 8:
            # int8 plus 128 is the same byte with its highest bit flipped.
            codes = stored[..., start:] ^ 128
        elif bits == 5:
            fifth = np.unpackbits(stored[..., start : start + 4], -1, bitorder="little")
            codes = nibbles(stored[..., start + 4 :]) | fifth << 4
        else:
            codes = nibbles(stored[..., start:])
        middle = np.float32(2 ** (bits - 1))
        biases = -middle * scales.astype(np.float32)
        if has_minimum:
            biases = float16_at(stored, 2)
    rows, width = math.prod(tensor.shape[:-1]), tensor.shape[-1]
    packed = pack_codes(mx.array(codes.reshape(rows, width)), bits)
    mx.eval(packed)
    scales, biases = narrow_biases(
        mx.array(scales.reshape(rows, -1)),
        mx.array(biases.reshape(rows, -1).astype(np.float32)),
    )
    index = np.arange(width) // BLOCK
    experts = tensor.shape[0] if len(tensor.shape) == 3 else None
    return AffineGroups(packed, scales, biases, index, bits, experts)


def to_dense(tensor: GGUFTensor, offset: int = 0) -> mx.array:
    """A tensor's values; float32 values in 16 bits if that changes none.

    Args:
        offset: what the file has added to the values of a float32 tensor.
    """
    if tensor.ggml_type == "BF16":
        bits = mx.array(np.ascontiguousarray(tensor.blocks).view(np.uint16))
        return bits.view(mx.bfloat16).reshape(tensor.shape)
    dtype = {"F32": np.float32, "F16": np.float16}.get(tensor.ggml_type)
    if dtype is None:
        import gguf

        rows = tensor.blocks.reshape(*tensor.shape[:-1], -1)
        kind = gguf.GGMLQuantizationType[tensor.ggml_type]
        return mx.array(gguf.quants.dequantize(rows, kind))
    stored = np.ascontiguousarray(tensor.blocks).view(dtype)
    values = mx.array(stored - dtype(offset) if offset else stored)
    values = values.reshape(tensor.shape)
    # llama.cpp stores all norms as float32, which would make a model compute in it.
    for narrow in (mx.float16, mx.bfloat16):
        rounded = values.astype(narrow)
        if mx.array_equal(rounded.astype(values.dtype), values):
            return rounded
    return values


def from_affine_groups(
    parts: dict[str, mx.array], bits: int, group_size: int
) -> tuple[str, np.ndarray] | None:
    """ggml's type and the bytes [..., rows, bytes of a row] of a quantized matrix, or
    of those of all experts.

    A group of more than 32 weights becomes several blocks with the same scale.

    Args:
        parts: weight (codes), scales and biases, as MLX stores them.

    Returns:
        None if ggml has no such codes, or neither float16 nor K blocks hold the scales
        and biases.
    """
    symmetric_type, minimum_type = TYPES_BY_BITS.get(bits, (None, None))
    *experts, rows, _ = parts["weight"].shape
    parts = {
        name: parts[name].reshape(-1, parts[name].shape[-1])
        for name in ("weight", "scales", "biases")
    }
    scales, biases = (
        np.repeat(np.array(parts[name].astype(mx.float32)), group_size // BLOCK, -1)
        for name in ("scales", "biases")
    )
    codes = np.array(unpack_codes(parts["weight"], bits).astype(mx.uint8))
    codes = codes.reshape(*scales.shape, BLOCK)
    if symmetric_type and (biases == -(2 ** (bits - 1)) * scales).all():
        ggml_type, values = symmetric_type, [scales]
    elif in_blocks := k_blocks.from_groups(codes, scales, biases, bits):
        return in_blocks[0], in_blocks[1].reshape(*experts, rows, -1)
    else:
        ggml_type, values = minimum_type, [scales, biases]
    halves = [value.astype(np.float16) for value in values]
    exact = all((h == v).all() for h, v in zip(halves, values, strict=True))
    if ggml_type is None or not exact:
        return None
    parts = [half[..., None].view(np.uint8) for half in halves]
    if ggml_type == "Q8_0":
        # Codes minus 128, as int8.
        parts.append(codes ^ 128)
    else:
        if ggml_type.startswith("Q5"):
            parts.append(np.packbits(codes >> 4, axis=-1, bitorder="little"))
        parts.append((codes[..., :16] & 15) | ((codes[..., 16:] & 15) << 4))
    blocks = np.concatenate(parts, axis=-1)
    return ggml_type, blocks.reshape(*experts, rows, -1)


def from_dense(
    value: mx.array, factors: k_blocks.Factors | None = None
) -> tuple[str, np.ndarray]:
    """ggml's type of an unquantized tensor, and its values in that type.

    float32 for vectors, as llama.cpp requires, and for values beyond float16; K blocks
    if the factors are those of the values; else float16, or bfloat16 if only that holds
    the values exactly.
    """
    wide = np.array(value.astype(mx.float32))
    if wide.ndim < 2:
        return "F32", wide
    if factors and (in_blocks := k_blocks.from_factors(wide, *factors)):
        return in_blocks
    with np.errstate(over="ignore"):
        half = wide.astype(np.float16)
    if not np.isfinite(half).all():
        return "F32", wide
    if value.dtype == mx.bfloat16 and (half != wide).any():
        return "BF16", np.array(mx.contiguous(value).view(mx.uint16))
    return "F16", half


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


def to_float_groups(tensor: GGUFTensor) -> FloatGroups | None:
    """The matrices of a tensor; None for a type without such groups."""
    if tensor.ggml_type not in FLOAT_TYPES:
        return None
    mode, groups = FLOAT_TYPES[tensor.ggml_type]
    rows, width = tensor.shape[:-1], tensor.shape[-1]
    bytes_of_codes = tensor.blocks[..., groups:]
    codes = nibbles(bytes_of_codes.reshape(-1, bytes_of_codes.shape[-1] // groups))
    packed = pack_codes(mx.array(codes.reshape(math.prod(rows), width)), 4)
    scales = mx.array(np.ascontiguousarray(tensor.blocks[..., :groups]))
    mx.eval(packed)
    return FloatGroups(packed.reshape(*rows, -1), scales.reshape(*rows, -1), mode)


def from_float_groups(
    parts: dict[str, mx.array], mode: str
) -> tuple[str, np.ndarray] | None:
    """ggml's type and the bytes [..., rows, bytes of a row] of a quantized matrix.

    Args:
        parts: weight (codes) and scales, as MLX stores them.

    Returns:
        None if ggml has no such blocks: of the mode, of a row of this width, or with a
        scale for the whole matrix.
    """
    ggml_type, groups = FLOAT_TYPES_BY_MODE.get(mode, (None, 1))
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
