"""llm-compressor checkpoints in the format "pack-quantized" of compressed-tensors.

Tensors of a layer with K inputs and N outputs: weight_packed int32 [N, K * bits / 32],
where every row is a stream of codes; weight_scale [N, G]; if asymmetric,
weight_zero_point int32 [N * bits / 32, G], where every column is a stream; weight_shape
(N, K); with activation order, weight_g_idx [K]. Codes and zero points are signed and
stored with an offset of 2^(bits - 1).
"""

import math

import mlx.core as mx
import numpy as np

from ...errors import UserError
from ...quantization.bit_packing import unpack_codes
from .affine_repack import AffineGroups, from_zero_points, require_shape, require_tensor

CODES = "weight_packed"
LEAVES = (
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
)
FORMAT = "pack-quantized"
BITS = (4, 8)


def reads(settings: dict) -> bool:
    """Whether a config's `quantization_config` names this format."""
    is_packed = settings.get("format") == FORMAT
    return settings.get("quant_method") == "compressed-tensors" and is_packed


def read_layer(tensors: dict[str, mx.array], settings: dict, name: str) -> AffineGroups:
    """A layer from its tensors by leaf name.

    Raises:
        UserError: a code width that MLX lacks; tensors are missing or have wrong
            shapes.
    """
    packed = tensors[CODES]
    scales = require_tensor(tensors, name, "weight_scale")
    outputs, inputs = require_tensor(tensors, name, "weight_shape").tolist()
    schemes = [group["weights"] for group in settings["config_groups"].values()]
    words, bits = packed.shape[-1], packed.shape[-1] * 32 / inputs
    if bits not in {scheme["num_bits"] for scheme in schemes} or bits not in BITS:
        raise UserError(
            f"{words} words in a row of {inputs} inputs are not codes of "
            f"{' or '.join(map(str, BITS))} bits, which the config declares",
            place=f"{name}.{CODES}",
        )
    bits = int(bits)
    require_shape(packed, (outputs, inputs * bits // 32), f"{name}.{CODES}")
    groups = scales.shape[-1]
    require_shape(scales, (outputs, groups), f"{name}.weight_scale")
    zeros = mx.full((outputs, groups), 2 ** (bits - 1))
    is_symmetric = all(scheme.get("symmetric", True) for scheme in schemes)
    if "weight_zero_point" in tensors or not is_symmetric:
        stored = require_tensor(tensors, name, "weight_zero_point")
        rows = math.ceil(outputs * bits / 32)
        require_shape(stored, (rows, groups), f"{name}.weight_zero_point")
        streams = mx.contiguous(stored.T)
        zeros = unpack_codes(streams, bits)[:, :outputs].T.astype(mx.int32)
    scales, biases = from_zero_points(scales, zeros)
    group_index = np.arange(inputs) // math.ceil(inputs / groups)
    if "weight_g_idx" in tensors:
        group_index = index = np.array(tensors["weight_g_idx"])
        if index.shape != (inputs,) or index.min() < 0 or index.max() >= groups:
            raise UserError(
                f"it must hold one of {groups} groups for each of {inputs} inputs",
                place=f"{name}.weight_g_idx",
            )
    return AffineGroups(packed.view(mx.uint32), scales, biases, group_index, bits)
