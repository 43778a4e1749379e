"""Checkpoints of llm-compressor in the format "pack-quantized" of compressed-tensors.

Per layer of K inputs and N outputs: weight_packed int32 [N, K * bits / 32], every row
one stream of codes; weight_scale [N, G]; if asymmetric, weight_zero_point int32
[N * bits / 32, G], every column one stream; weight_shape (N, K); where inputs were
ordered, weight_g_idx [K]. Codes and zeros are signed and stored 2^(bits - 1) higher.
"""

import math

import mlx.core as mx
import numpy as np

from ...errors import UserError
from .affine_repack import Groups, from_zeros, part, require_shape, unpack

MARK = "weight_packed"
LEAVES = (
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
)
FORMAT = "pack-quantized"
WIDTHS = (4, 8)


def reads(settings: dict) -> bool:
    """Whether a config's `quantization_config` names this format."""
    packed = settings.get("format") == FORMAT
    return settings.get("quant_method") == "compressed-tensors" and packed


def layer(parts: dict[str, mx.array], settings: dict, name: str) -> Groups:
    """A layer's tensors by their last names, in groups.

    Raises:
        UserError: codes of a width MLX lacks; tensors missing or of wrong shapes.
    """
    packed, scales = parts[MARK], part(parts, name, "weight_scale")
    outputs, inputs = part(parts, name, "weight_shape").tolist()
    bits = _width(packed, inputs, settings, name)
    require_shape(packed, (outputs, inputs * bits // 32), f"{name}.{MARK}")
    groups = scales.shape[-1]
    require_shape(scales, (outputs, groups), f"{name}.weight_scale")
    zeros = mx.full((outputs, groups), 2 ** (bits - 1))
    if "weight_zero_point" in parts or not _symmetric(settings):
        stored = part(parts, name, "weight_zero_point")
        rows = math.ceil(outputs * bits / 32)
        require_shape(stored, (rows, groups), f"{name}.weight_zero_point")
        zeros = unpack(mx.contiguous(stored.T), bits)[:, :outputs].T.astype(mx.int32)
    owners = _owners(parts, inputs, groups, name)
    words = packed.view(mx.uint32)
    return Groups(words, *from_zeros(scales, zeros), owners, bits)


def _schemes(settings: dict) -> list[dict]:
    return [group["weights"] for group in settings["config_groups"].values()]


def _symmetric(settings: dict) -> bool:
    return all(scheme.get("symmetric", True) for scheme in _schemes(settings))


def _width(packed: mx.array, inputs: int, settings: dict, name: str) -> int:
    widths = {scheme["num_bits"] for scheme in _schemes(settings)}
    found = packed.shape[-1] * 32 / inputs
    if found not in widths or found not in WIDTHS:
        raise UserError(
            f"{packed.shape[-1]} words in a row of {inputs} inputs are no codes of "
            f"{' or '.join(map(str, WIDTHS))} bits as the config has them",
            place=f"{name}.{MARK}",
        )
    return int(found)


def _owners(
    parts: dict[str, mx.array], inputs: int, groups: int, name: str
) -> np.ndarray:
    if "weight_g_idx" not in parts:
        return np.arange(inputs) // math.ceil(inputs / groups)
    owners = np.array(parts["weight_g_idx"])
    if owners.shape != (inputs,) or owners.min() < 0 or owners.max() >= groups:
        raise UserError(
            f"it must name one of {groups} groups for each of {inputs} inputs",
            place=f"{name}.weight_g_idx",
        )
    return owners
