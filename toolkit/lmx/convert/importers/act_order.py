"""Undoes activation order (`desc_act`, `g_idx`) where that is exact.

With activation order, the columns of a group are not adjacent, which MLX cannot store.
"""

import mlx.core as mx
import numpy as np

from ...errors import UserError
from .affine_repack import AffineGroups

# The down projection of a gated MLP reads the elementwise product of these two.
CONSUMER, PRODUCERS = "down_proj", ("gate_proj", "up_proj")


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
        producers = _producers(name, layers, dense)
        layers[name] = layer.permute_columns(order)
        if not producers or not layers[name].group_size:
            raise UserError(
                "the columns of a group are not adjacent (desc_act), and the input of "
                "this layer cannot be permuted, because other layers read it",
                place=name,
                hint="use a checkpoint made without desc_act or actorder, or with "
                "static groups",
            )
        for producer in producers:
            _permute_rows(producer, order, layers, dense)


def _producers(
    name: str, layers: dict[str, AffineGroups], dense: dict[str, mx.array]
) -> list[str]:
    """The layers whose outputs only `name` reads; empty if that is not certain."""
    block, _, leaf = name.rpartition(".")
    prefix = f"{block}."
    members = {
        n.removeprefix(prefix).split(".")[0] for n in dense if n.startswith(prefix)
    }
    members |= {n.removeprefix(prefix) for n in layers if n.startswith(prefix)}
    if leaf != CONSUMER or members != {CONSUMER, *PRODUCERS}:
        return []
    return [f"{block}.{producer}" for producer in PRODUCERS]


def _permute_rows(
    name: str,
    order: np.ndarray,
    layers: dict[str, AffineGroups],
    dense: dict[str, mx.array],
) -> None:
    if name in layers:
        layers[name] = layers[name].permute_rows(order)
    for leaf in ("weight", "bias"):
        if f"{name}.{leaf}" in dense:
            dense[f"{name}.{leaf}"] = dense[f"{name}.{leaf}"][mx.array(order)]
