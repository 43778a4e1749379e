"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them.

Per layer of K inputs and N outputs: qweight int32 [K * bits / 32, N], every column one
stream of bits; scales [G, N]; qzeros int32 [G, N * bits / 32], every row one stream;
g_idx int32 [K], the group of every input. weight = (code - zero) * scale, where the
first version of the format stores zero - 1. Turned, qweight is what MLX stores.
"""

import math

import mlx.core as mx
import numpy as np

from ...errors import UserError
from .affine_repack import Groups, from_zeros, part, require_shape, unpack

MARK = "qweight"
LEAVES = ("qweight", "qzeros", "scales", "g_idx")
# What is added to the zeros that are stored.
OFFSETS = {"gptq": 1, "gptq_v2": 0}
WIDTHS = (2, 3, 4, 8)


def reads(settings: dict) -> bool:
    """Whether a config's `quantization_config` names this format."""
    return settings.get("quant_method") == "gptq"


def layer(parts: dict[str, mx.array], settings: dict, name: str) -> Groups:
    """A layer's tensors by their last names, in groups.

    Raises:
        UserError: another version of the format; tensors missing or of wrong shapes.
    """
    offset = _offset(settings)
    qweight, scales = parts[MARK], part(parts, name, "scales")
    rows, outputs = qweight.shape
    inputs, bits = _width(parts, settings, rows, name)
    owners = _owners(parts, settings, inputs, scales.shape[0], name)
    groups = int(owners.max()) + 1
    require_shape(scales, (groups, outputs), f"{name}.scales")
    zeros = mx.full((groups, outputs), 2 ** (bits - 1))
    if "qzeros" in parts or not settings.get("sym"):
        qzeros = part(parts, name, "qzeros")
        require_shape(qzeros, (groups, outputs * bits // 32), f"{name}.qzeros")
        zeros = unpack(qzeros, bits).astype(mx.int32) + offset
    words = mx.contiguous(qweight.T).view(mx.uint32)
    return Groups(words, *from_zeros(scales.T, zeros.T), owners, bits)


def _offset(settings: dict) -> int:
    version = settings.get("checkpoint_format", "gptq")
    if version not in OFFSETS:
        raise UserError(
            f"GPTQ weights in the layout {version!r} are packed for one kernel",
            hint=f"look for a checkpoint in the layout {' or '.join(OFFSETS)}",
        )
    return OFFSETS[version]


def _width(
    parts: dict[str, mx.array], settings: dict, rows: int, name: str
) -> tuple[int, int]:
    """Inputs of the layer, and bits of its codes: one of those the config names."""
    for bits in sorted(_declared(settings, "bits")):
        if bits not in WIDTHS:
            raise UserError(f"GPTQ codes have {WIDTHS} bits, not {bits}", place=name)
        inputs = rows * 32 // bits
        if "g_idx" not in parts or parts["g_idx"].shape == (inputs,):
            return inputs, bits
    raise UserError(
        f"{rows} rows of codes do not fit to {parts['g_idx'].size} inputs",
        place=f"{name}.qweight",
        hint="the checkpoint is damaged, or its config is of another one",
    )


def _owners(
    parts: dict[str, mx.array], settings: dict, inputs: int, groups: int, name: str
) -> np.ndarray:
    if "g_idx" in parts:
        owners = np.array(parts["g_idx"])
        if owners.min() < 0:
            raise UserError("it names a group below zero", place=f"{name}.g_idx")
        return owners
    sizes = {size if size > 0 else inputs for size in _declared(settings, "group_size")}
    fitting = [size for size in sizes if math.ceil(inputs / size) == groups]
    return np.arange(inputs) // (fitting or sorted(sizes))[0]


def _declared(settings: dict, key: str) -> set[int]:
    """What the config says of all layers, and of those it treats apart."""
    apart = (settings.get("dynamic") or {}).values()
    blocks = [block for block in (settings, *apart) if isinstance(block, dict)]
    return {block[key] for block in blocks if key in block}
