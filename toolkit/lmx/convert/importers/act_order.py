"""Columns in an order of their own ("desc_act"), where that can be undone exactly."""

import mlx.core as mx
import numpy as np

from ...errors import UserError
from .affine_repack import Groups

# The down projection of a gated block reads the product of these two, number by number.
READER, PRODUCERS = "down_proj", ("gate_proj", "up_proj")


def settle(layers: dict[str, Groups], dense: dict[str, mx.array]) -> None:
    """Sort by group the columns of every layer whose groups are not runs of columns.

    The rows of the layers that produce its input follow, so that the model computes
    the same.

    Raises:
        UserError: other layers read that input too, or groups have sizes MLX lacks.
    """
    for name, layer in list(layers.items()):
        if layer.size:
            continue
        order = np.argsort(layer.owners, kind="stable")
        if (layer.owners[order] == layer.owners).all():
            sizes = sorted(set(np.bincount(layer.owners).tolist()))
            raise UserError(
                f"groups of {', '.join(map(str, sizes))} columns do not divide into "
                "groups of 32, 64 or 128, which are what MLX has",
                place=name,
            )
        producers = _producers(name, layers, dense)
        layers[name] = layer.columns(order)
        if not producers or not layers[name].size:
            raise UserError(
                "the columns of a group are not side by side (desc_act), and the order "
                "of this layer's input cannot be changed, as other layers read it",
                place=name,
                hint="look for a checkpoint made with desc_act or actorder off, or "
                "with static groups",
            )
        for producer in producers:
            _reorder(producer, order, layers, dense)


def _producers(
    name: str, layers: dict[str, Groups], dense: dict[str, mx.array]
) -> list[str]:
    """The layers whose rows alone a layer reads; none if that is not known."""
    block, _, last = name.rpartition(".")
    inside = {n.removeprefix(f"{block}.").split(".")[0] for n in _below(block, dense)}
    inside |= {n.removeprefix(f"{block}.") for n in _below(block, layers)}
    if last != READER or inside != {READER, *PRODUCERS}:
        return []
    return [f"{block}.{producer}" for producer in PRODUCERS]


def _below(block: str, names: dict) -> list[str]:
    return [name for name in names if name.startswith(f"{block}.")]


def _reorder(
    name: str,
    order: np.ndarray,
    layers: dict[str, Groups],
    dense: dict[str, mx.array],
) -> None:
    if name in layers:
        layers[name] = layers[name].rows(order)
    for leaf in ("weight", "bias"):
        if f"{name}.{leaf}" in dense:
            dense[f"{name}.{leaf}"] = dense[f"{name}.{leaf}"][mx.array(order)]
