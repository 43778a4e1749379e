"""AWQ checkpoints in AutoAWQ's layout "gemm".

Per layer of K inputs and N outputs: qweight int32 [K, N / 8], scales [G, N] and qzeros
int32 [G, N / 8]. A word holds eight outputs of 4 bits, from the lowest bits on the
outputs 0, 2, 4, 6, 1, 3, 5, 7. weight = (code - zero) * scale.
"""

import math

import mlx.core as mx
import numpy as np

from ...errors import UserError
from .groups import Groups, from_zeros, pack, part, require_shape, unpack

MARK = "qweight"
LEAVES = ("qweight", "qzeros", "scales")
BITS, PER_WORD = 4, 8
# Where the outputs 0 to 7 are in a word.
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


def reads(settings: dict) -> bool:
    """Whether a config's `quantization_config` names this format."""
    return settings.get("quant_method") == "awq"


def layer(parts: dict[str, mx.array], settings: dict, name: str) -> Groups:
    """A layer's tensors by their last names, in groups.

    Raises:
        UserError: another layout; tensors missing or of wrong shapes.
    """
    _require_layout(settings)
    qweight = parts[MARK]
    inputs, packed = qweight.shape
    size = settings["group_size"] if settings["group_size"] > 0 else inputs
    groups = math.ceil(inputs / size)
    scales, qzeros = part(parts, name, "scales"), part(parts, name, "qzeros")
    require_shape(scales, (groups, packed * PER_WORD), f"{name}.scales")
    require_shape(qzeros, (groups, packed), f"{name}.qzeros")
    zeros = _ordered(qzeros).astype(mx.int32)
    words = pack(_ordered(qweight).T, BITS)
    owners = np.arange(inputs) // size
    return Groups(words, *from_zeros(scales.T, zeros.T), owners, BITS)


def _ordered(words: mx.array) -> mx.array:
    """The codes [..., N] of words [..., N / 8] in the order of the outputs."""
    codes = unpack(words, BITS)
    octets = codes.reshape(*codes.shape[:-1], -1, PER_WORD)
    return octets[..., mx.array(PLACES)].reshape(codes.shape)


def _require_layout(settings: dict) -> None:
    layout, bits = settings.get("version", "gemm").lower(), settings.get("bits", BITS)
    if (layout, bits) != ("gemm", BITS):
        raise UserError(
            f"AWQ weights of {bits} bits in the layout {layout!r} are not known here",
            hint=f"look for a checkpoint of {BITS} bits in the layout 'gemm'",
        )
