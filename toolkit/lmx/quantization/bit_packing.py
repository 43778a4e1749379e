"""Pack codes as MLX stores them: each row is one little-endian bit stream."""

import mlx.core as mx

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
