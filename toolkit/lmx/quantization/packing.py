"""Pack codes as MLX stores them: each row is one little-endian bit stream."""

import mlx.core as mx

from ..config.quant_spec import QuantSpec

# Eight codes fill whole bytes at every bit width.
CODES_PER_WORD = 8


def pack_codes(codes: mx.array, bits: int) -> mx.array:
    """Pack codes [..., K] of any dtype into uint32 words [..., K * bits / 32].

    Code i of a row starts at bit i * bits.
    """
    *rows, width = codes.shape
    words = mx.zeros((*rows, width // CODES_PER_WORD), mx.uint64)
    for place in range(CODES_PER_WORD):
        column = codes[..., place::CODES_PER_WORD].astype(mx.uint64)
        words = words | (column << place * bits)
    # The first bytes of a word hold its lowest bits.
    stream = words[..., None].view(mx.uint8)[..., :bits]
    return stream.reshape(*rows, width * bits // CODES_PER_WORD).view(mx.uint32)


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
    """Quantize a weight [..., K] with RTN on MLX's own grid.

    Args:
        dtype: dtype that the checkpoint stores. The weight is cast to it first, because
            the codes depend on the dtype.

    Returns:
        The stored tensors: weight (packed codes), scales and, if affine, biases.
    """
    tensors = mx.quantize(
        weight.astype(dtype),
        group_size=spec.group_size,
        bits=spec.bits,
        mode=spec.mode,
    )
    return dict(zip(("weight", "scales", "biases"), tensors, strict=False))


def packed_bytes(size: int, spec: QuantSpec, dtype: mx.Dtype) -> int:
    """Size in bytes of the packed tensors of this many weights."""
    group_bytes = 2 * dtype.size if spec.mode == "affine" else 1
    return size * spec.bits // 8 + size // spec.group_size * group_bytes


def dequantize(
    tensors: dict[str, mx.array], spec: QuantSpec, dtype: mx.Dtype
) -> mx.array:
    """The weight [..., K] of packed tensors, computed in `dtype`."""
    return mx.dequantize(
        tensors["weight"],
        tensors["scales"],
        tensors.get("biases"),
        group_size=spec.group_size,
        bits=spec.bits,
        mode=spec.mode,
        dtype=dtype,
    )
