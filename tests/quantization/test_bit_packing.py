"""Code packing equals that of MLX, bit for bit."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.quantization import bit_packing

WIDTHS = (2, 3, 4, 5, 6, 8)


@pytest.mark.parametrize("bits", WIDTHS)
def test_packing_matches_mlx(bits):
    weight = mx.random.normal((5, 192), key=mx.random.key(bits))
    packed, scales, biases = mx.quantize(weight, group_size=64, bits=bits)
    codes = bit_packing.unpack_codes(packed, bits)
    assert codes.shape == weight.shape
    assert codes.max().item() == 2**bits - 1
    grid = (mx.repeat(v, 64, axis=1) for v in (scales, biases))
    scale, bias = grid
    expected = mx.dequantize(packed, scales, biases, group_size=64, bits=bits)
    assert mx.array_equal(codes.astype(mx.float32) * scale + bias, expected)
    assert mx.array_equal(bit_packing.pack_codes(codes, bits), packed)


@pytest.mark.parametrize("bits", WIDTHS)
def test_code_starts_at_its_bit(bits):
    codes = np.random.default_rng(0).integers(0, 2**bits, (7, 96))
    packed = np.array(bit_packing.pack_codes(mx.array(codes), bits))
    for row, packed_row in zip(codes, packed, strict=True):
        stream = int.from_bytes(packed_row.tobytes(), "little")
        actual = [(stream >> (i * bits)) % 2**bits for i in range(96)]
        assert actual == row.tolist()
