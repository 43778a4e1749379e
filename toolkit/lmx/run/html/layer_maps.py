"""Tables of the bits and the errors of a model's layers, with shades."""

import math
import re
from typing import Any

from ..tables import ABSENT
from .blocks import Block, table

BLOCK_PATH = re.compile(r"^.*?\.(\d+)\.(.+)$")
# The column of layers outside of blocks, which have a row each.
OUTSIDE = "outside of blocks"
BITS = "Bits per layer, {}. Bits / group size. Darker cells have more bits."
ERROR = (
    "Relative weight error, {}. Squared error of the weights in % of their squared "
    "norm. Darker cells have a larger error."
)
DARKEST = 5
# Signal-to-error ratio of the lightest shade; each darker shade has 5 dB less.
LIGHTEST_DECIBELS = 30


def layer_maps(models: dict[str, dict]) -> list[Block]:
    """The maps of every model with measured layers: a row for each block of layers."""
    tables: list[Block] = []
    for model, figures in models.items():
        layers = figures.get("layers") or {}
        grid: dict[int | str, dict[str, str]] = {}
        for path in layers:
            match = BLOCK_PATH.match(path)
            row, name = (int(match[1]), match[2]) if match else (path, OUTSIDE)
            grid.setdefault(row, {})[name] = path
        order = sorted(grid, key=lambda row: (isinstance(row, str), row))
        found = {name for paths in grid.values() for name in paths}
        names = sorted(found, key=lambda name: (name == OUTSIDE, name))
        has_errors = any(layer.get("error") is not None for layer in layers.values())
        maps = [(BITS, _bits)] * bool(layers) + [(ERROR, _error)] * has_errors
        for title, cell in maps:
            cells = {path: cell(v) | {"title": path} for path, v in layers.items()}
            rows = [
                [str(row), *(cells.get(grid[row].get(name), "") for name in names)]
                for row in order
            ]
            tables.append(table(title.format(model), ["block", *names], rows, "map"))
    return tables


def _bits(layer: dict) -> dict[str, Any]:
    bits, group = layer.get("bits"), layer.get("group_size")
    if bits is None:
        return _cell(ABSENT, 0)
    # 2, 3, 4, 5, 6 and more.
    return _cell(f"{bits}/{group}" if group else f"{bits}", bits - 2)


def _error(layer: dict) -> dict[str, Any]:
    error = layer.get("error")
    if error is None or not math.isfinite(error):
        return _cell(ABSENT, 0)
    decibels = -10 * math.log10(error) if error > 0 else LIGHTEST_DECIBELS
    return _cell(f"{100 * error:.2g}", math.ceil((LIGHTEST_DECIBELS - decibels) / 5))


def _cell(text: str, shade: int) -> dict[str, Any]:
    return {"text": text, "style": f"--shade: {max(0, min(shade, DARKEST))}"}
