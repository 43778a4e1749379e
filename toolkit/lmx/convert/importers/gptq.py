"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them (arXiv 2210.17323).

Tensors of a layer with K inputs and N outputs: qweight int32 [K * bits / 32, N], where
every column is a stream of bits; scales [G, N]; qzeros int32 [G, N * bits / 32], where
every row is a stream; g_idx int32 [K], the group of every input.
weight = (code - zero point) * scale. Version 1 of the format stores zero point - 1. MLX
stores the transpose of qweight.
"""

import math

import mlx.core as mx
import numpy as np

from ...errors import UserError
from ...quantization.bit_packing import unpack_codes
from .affine_repack import AffineGroups, from_zero_points, require_shape, require_tensor

CODES = "qweight"
LEAVES = ("qweight", "qzeros", "scales", "g_idx")
# Added to the stored zero points, by format version.
ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
BITS = (2, 3, 4, 8)


# The down projection of a gated MLP reads the elementwise product of these two.
CONSUMER, PRODUCERS = "down_proj", ("gate_proj", "up_proj")


def reads(settings: dict) -> bool:
    """Whether a config's `quantization_config` names this format."""
    return settings.get("quant_method") == "gptq"


def read_layer(tensors: dict[str, mx.array], settings: dict, name: str) -> AffineGroups:
    """A layer from its tensors by leaf name.

    Raises:
        UserError: another version of the format; tensors are missing or have wrong
            shapes.
    """
    version = settings.get("checkpoint_format", "gptq")
    if version not in ZERO_OFFSETS:
        raise UserError(
            f"GPTQ weights in the layout {version!r} are packed for one kernel",
            hint=f"use a checkpoint in the layout {' or '.join(ZERO_OFFSETS)}",
        )
    qweight, scales = tensors[CODES], require_tensor(tensors, name, "scales")
    rows, outputs = qweight.shape
    for bits in sorted(_declared_values(settings, "bits")):
        if bits not in BITS:
            raise UserError(f"GPTQ codes have {BITS} bits, not {bits}", place=name)
        inputs = rows * 32 // bits
        if "g_idx" not in tensors or tensors["g_idx"].shape == (inputs,):
            break
    else:
        raise UserError(
            f"{rows} rows of packed codes do not fit to {tensors['g_idx'].size} inputs",
            place=f"{name}.qweight",
            hint="the checkpoint is damaged, or its config belongs to another one",
        )
    if "g_idx" in tensors:
        group_index = np.array(tensors["g_idx"])
        if group_index.min() < 0:
            raise UserError("a group index is negative", place=f"{name}.g_idx")
    else:
        declared = _declared_values(settings, "group_size")
        sizes = {size if size > 0 else inputs for size in declared}
        fitting = [s for s in sizes if math.ceil(inputs / s) == len(scales)]
        group_index = np.arange(inputs) // (fitting or sorted(sizes))[0]
    groups = int(group_index.max()) + 1
    require_shape(scales, (groups, outputs), f"{name}.scales")
    zeros = mx.full((groups, outputs), 2 ** (bits - 1))
    if "qzeros" in tensors or not settings.get("sym"):
        qzeros = require_tensor(tensors, name, "qzeros")
        require_shape(qzeros, (groups, outputs * bits // 32), f"{name}.qzeros")
        zeros = unpack_codes(qzeros, bits).astype(mx.int32) + ZERO_OFFSETS[version]
    packed = mx.contiguous(qweight.T).view(mx.uint32)
    scales, biases = from_zero_points(scales.T, zeros.T)
    return AffineGroups(packed, scales, biases, group_index, bits)


def _declared_values(settings: dict, key: str) -> set[int]:
    """The values of a key in the config: for all layers and for single ones."""
    overrides = (settings.get("dynamic") or {}).values()
    blocks = [block for block in (settings, *overrides) if isinstance(block, dict)]
    return {block[key] for block in blocks if key in block}


def undo_activation_order(
    layers: dict[str, AffineGroups], dense: dict[str, mx.array]
) -> None:
    """Sort the columns by group in every layer whose groups are not adjacent columns.

    The rows of the layers that produce its input are permuted alike, so that the model
    computes the same.

    Raises:
        UserError: other layers read that input too, or MLX lacks the group size.
    """
    for name, layer in list(layers.items()):
        if layer.group_size:
            continue
        order = np.argsort(layer.group_index, kind="stable")
        if (layer.group_index[order] == layer.group_index).all():
            sizes = sorted(set(np.bincount(layer.group_index).tolist()))
            raise UserError(
                f"groups of {', '.join(map(str, sizes))} columns do not divide into "
                "groups of 32, 64 or 128 columns, the sizes that MLX supports",
                place=name,
            )
        # The layers whose outputs only this one reads, if that is certain.
        block, _, leaf = name.rpartition(".")
        inside = [n for n in (*dense, *layers) if n.startswith(f"{block}.")]
        members = {n.removeprefix(f"{block}.").split(".")[0] for n in inside}
        has_producers = leaf == CONSUMER and members == {CONSUMER, *PRODUCERS}
        layers[name] = layer.permute_columns(order)
        if not has_producers or not layers[name].group_size:
            raise UserError(
                "the columns of a group are not adjacent (desc_act), and the input of "
                "this layer cannot be permuted, because other layers read it",
                place=name,
                hint="use a checkpoint made without desc_act or actorder, or with "
                "static groups",
            )
        for producer in (f"{block}.{producer}" for producer in PRODUCERS):
            if producer in layers:
                layers[producer] = layers[producer].permute_rows(order)
            for tensor in (f"{producer}.weight", f"{producer}.bias"):
                if tensor in dense:
                    dense[tensor] = dense[tensor][mx.array(order)]
