"""Codes as MLX stores them: every row one little-endian stream of bits."""

import mlx.core as mx

# Codes packed at once; every one of them is 4 bytes per bit on the way.
AT_ONCE = 1 << 22


def pack_codes(codes: mx.array, bits: int) -> mx.array:
    """Codes [N, K] of any integer type as uint32 [N, K * bits / 32].

    Code i of a row has the bits from i * bits on, for every width.
    """
    rows = max(1, AT_ONCE // codes.shape[-1])
    parts = []
    for start in range(0, len(codes), rows):
        parts.append(_packed(codes[start : start + rows], bits))
        mx.eval(parts)
    return mx.concatenate(parts)


def unpack_codes(packed: mx.array, bits: int) -> mx.array:
    """The codes [N, K], uint32, of packed rows [N, K * bits / 32]."""
    stream = (packed[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
    single = stream.reshape(len(packed), -1, bits)
    return (single << mx.arange(bits, dtype=mx.uint32)).sum(axis=-1)


def _packed(codes: mx.array, bits: int) -> mx.array:
    single = codes.astype(mx.uint32)[..., None] >> mx.arange(bits, dtype=mx.uint32)
    words = (single & 1).reshape(len(codes), -1, 32)
    return (words << mx.arange(32, dtype=mx.uint32)).sum(axis=-1)
