"""Codes as MLX stores them: every row one little-endian stream of bits."""

import mlx.core as mx

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
    """The codes [N, K], uint32, of packed rows [N, K * bits / 32]."""
    stream = (packed[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
    single = stream.reshape(len(packed), -1, bits)
    return (single << mx.arange(bits, dtype=mx.uint32)).sum(axis=-1)
