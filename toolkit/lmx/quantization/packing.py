"""Codes as MLX stores them: every row one little-endian stream of bits."""

import mlx.core as mx

from ..config.quant_spec import QuantSpec

# Codes whose bits are whole bytes, for every width.
TOGETHER = 8


def pack_codes(codes: mx.array, bits: int) -> mx.array:
    """Codes [..., K] of any type as uint32 [..., K * bits / 32].

    Code i of a row has the bits from i * bits on, for every width.
    """
    *rows, width = codes.shape
    words = mx.zeros((*rows, width // TOGETHER), mx.uint64)
    for place in range(TOGETHER):
        words = words | (codes[..., place::TOGETHER].astype(mx.uint64) << place * bits)
    # A word's first bytes are its lowest bits.
    stream = words[..., None].view(mx.uint8)[..., :bits]
    return stream.reshape(*rows, width * bits // TOGETHER).view(mx.uint32)


def unpack_codes(packed: mx.array, bits: int) -> mx.array:
    """The codes [..., K], uint32, of 32-bit words [..., K * bits / 32]."""
    words = packed.view(mx.uint32)
    if 32 % bits == 0:
        shifts = mx.arange(0, 32, bits, dtype=mx.uint32)
        codes = (words[..., None] >> shifts) & (2**bits - 1)
        return codes.reshape(*packed.shape[:-1], -1)
    # 32 codes fill `bits` words, and some lie in two of them.
    words = words.reshape(*packed.shape[:-1], -1, bits)
    codes = []
    for index in range(32):
        word, shift = divmod(index * bits, 32)
        code = words[..., word] >> shift
        if shift + bits > 32:
            code = code | (words[..., word + 1] << (32 - shift))
        codes.append(code & (2**bits - 1))
    return mx.stack(codes, axis=-1).reshape(*packed.shape[:-1], -1)


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


def packed_bytes(size: int, spec: QuantSpec, dtype: mx.Dtype) -> int:
    """Bytes of what `pack` makes of that many weights."""
    of_group = 2 * dtype.size if spec.mode == "affine" else 1
    return size * spec.bits // 8 + size // spec.group_size * of_group


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
