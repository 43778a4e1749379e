"""AWQ checkpoints in AutoAWQ's layout "gemm" (arXiv 2306.00978).

Tensors of a layer with K inputs and N outputs: qweight int32 [K, N / 8], scales [G, N]
and qzeros int32 [G, N / 8]. A word holds eight 4-bit values, from its lowest bits on
those of the outputs 0, 2, 4, 6, 1, 3, 5, 7. weight = (code - zero point) * scale.
"""

import math

import mlx.core as mx
import numpy as np

from ...errors import UserError
from ...quantization.bit_packing import unpack_codes
from .affine_repack import AffineGroups, from_zero_points, require_shape, require_tensor

CODES = "qweight"
LEAVES = ("qweight", "qzeros", "scales")
BITS, PER_WORD = 4, 8
# Position of the outputs 0 to 7 in a word.
POSITIONS = [0, 4, 1, 5, 2, 6, 3, 7]


def reads(settings: dict) -> bool:
    """Whether a config's `quantization_config` names this format."""
    return settings.get("quant_method") == "awq"


def read_layer(tensors: dict[str, mx.array], settings: dict, name: str) -> AffineGroups:
    """A layer from its tensors by leaf name.

    Raises:
        UserError: another layout; tensors are missing or have wrong shapes.
    """
    layout, bits = settings.get("version", "gemm").lower(), settings.get("bits", BITS)
    if (layout, bits) != ("gemm", BITS):
        raise UserError(
            f"AWQ weights of {bits} bits in the layout {layout!r} are not supported",
            hint=f"use a checkpoint of {BITS} bits in the layout 'gemm'",
        )
    qweight = tensors[CODES]
    inputs, words = qweight.shape
    require_shape(qweight, (inputs // PER_WORD * PER_WORD, words), f"{name}.{CODES}")
    group_size = settings["group_size"] if settings["group_size"] > 0 else inputs
    groups = math.ceil(inputs / group_size)
    scales = require_tensor(tensors, name, "scales")
    qzeros = require_tensor(tensors, name, "qzeros")
    require_shape(scales, (groups, words * PER_WORD), f"{name}.scales")
    require_shape(qzeros, (groups, words), f"{name}.qzeros")
    octets = unpack_codes(qzeros, BITS).reshape(groups, words, PER_WORD)
    zeros = octets[..., mx.array(POSITIONS)].reshape(scales.shape).astype(mx.int32)
    # Words [K, N / 8] of eight outputs each as words [N, K / 8] of eight inputs.
    rows = qweight.view(mx.uint32).reshape(-1, PER_WORD, words)
    shifts = mx.arange(0, 32, BITS, dtype=mx.uint32)[:, None]
    outputs = [
        (((rows >> (BITS * position)) & 15) << shifts).sum(axis=1)
        for position in POSITIONS
    ]
    joined = mx.stack(outputs, axis=-1).reshape(len(rows), -1)
    packed = mx.contiguous(joined.T).astype(mx.uint32)
    # Evaluate layer by layer, so that the temporaries of one layer are in memory.
    mx.eval(packed)
    return AffineGroups(
        packed,
        *from_zero_points(scales.T, zeros.T),
        group_index=np.arange(inputs) // group_size,
        bits=BITS,
    )
