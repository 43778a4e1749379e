"""AWQ checkpoints in AutoAWQ's layout "gemm".

Per layer of K inputs and N outputs: qweight int32 [K, N / 8], scales [G, N] and qzeros
int32 [G, N / 8]. A word holds eight outputs of 4 bits, from the lowest bits on the
outputs 0, 2, 4, 6, 1, 3, 5, 7. weight = (code - zero) * scale.
"""

import math

import mlx.core as mx
import numpy as np

from ...errors import UserError
from .affine_repack import Groups, from_zeros, part, require_shape, unpack

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
    require_shape(qweight, (inputs // PER_WORD * PER_WORD, packed), f"{name}.{MARK}")
    size = settings["group_size"] if settings["group_size"] > 0 else inputs
    groups = math.ceil(inputs / size)
    scales, qzeros = part(parts, name, "scales"), part(parts, name, "qzeros")
    require_shape(scales, (groups, packed * PER_WORD), f"{name}.scales")
    require_shape(qzeros, (groups, packed), f"{name}.qzeros")
    octets = unpack(qzeros, BITS).reshape(groups, packed, PER_WORD)
    zeros = octets[..., mx.array(PLACES)].reshape(scales.shape).astype(mx.int32)
    owners = np.arange(inputs) // size
    words = _turned(qweight)
    # One layer at a time, or what lies between would be there for all of them.
    mx.eval(words)
    return Groups(words, *from_zeros(scales.T, zeros.T), owners, BITS)


def _turned(qweight: mx.array) -> mx.array:
    """Words [K, N / 8] of eight outputs each as words [N, K / 8] of eight inputs."""
    rows = qweight.view(mx.uint32).reshape(-1, PER_WORD, qweight.shape[-1])
    shifts = mx.arange(0, 32, BITS, dtype=mx.uint32)[:, None]
    outputs = [
        (((rows >> (BITS * place)) & 15) << shifts).sum(axis=1) for place in PLACES
    ]
    words = mx.stack(outputs, axis=-1).reshape(len(rows), -1)
    return mx.contiguous(words.T).astype(mx.uint32)


def _require_layout(settings: dict) -> None:
    layout, bits = settings.get("version", "gemm").lower(), settings.get("bits", BITS)
    if (layout, bits) != ("gemm", BITS):
        raise UserError(
            f"AWQ weights of {bits} bits in the layout {layout!r} are not known here",
            hint=f"look for a checkpoint of {BITS} bits in the layout 'gemm'",
        )
