"""The map of a quantized model: bits and error of every layer, block by block."""

import math
import re
from dataclasses import dataclass

INSIDE = re.compile(r"^.*?\.(\d+)\.(.+)$")
SHADES = 6
# Of the signal over the error: the palest cell from here on, then a shade every 5.
LEAST_DECIBELS = 30
BITS = "After the slash, weights of a group. The stronger the colour, the more bits."
ERROR = (
    "Squared distance from the unquantized weights, in % of their squares. "
    "The stronger the colour, the more is lost."
)


@dataclass(frozen=True)
class Cell:
    """One layer; the shade, 0 to 5, is of its bits or of its error."""

    path: str
    text: str
    shade: int


@dataclass(frozen=True)
class LayerMap:
    """Cells by block and kind of layer, None where a block has no such layer.

    Attributes:
        outside: cells of the layers that are in no block.
    """

    title: str
    note: str
    kinds: list[str]
    blocks: list[tuple[int, list[Cell | None]]]
    outside: list[Cell]


def layer_maps(models: dict[str, dict]) -> dict[str, list[LayerMap]]:
    """The maps of every model whose layers were looked at, by its name."""
    found = {}
    for name, figures in models.items():
        if layers := figures.get("layers"):
            maps = [_map("Bits", BITS, layers, _bits)]
            if any(layer.get("error") is not None for layer in layers.values()):
                maps.append(_map("Error", ERROR, layers, _error))
            found[name] = maps
    return found


def _map(title: str, note: str, layers: dict[str, dict], cell) -> LayerMap:
    places = {path: INSIDE.match(path) for path in layers}
    kinds = sorted({m[2] for m in places.values() if m})
    numbers = sorted({int(m[1]) for m in places.values() if m})
    cells = {path: cell(path, layer) for path, layer in layers.items()}
    by_place = {(int(m[1]), m[2]): cells[path] for path, m in places.items() if m}
    return LayerMap(
        title=title,
        note=note,
        kinds=kinds,
        blocks=[(n, [by_place.get((n, kind)) for kind in kinds]) for n in numbers],
        outside=[cells[path] for path, m in places.items() if not m],
    )


def _bits(path: str, layer: dict) -> Cell:
    bits = layer.get("bits")
    if bits is None:
        return Cell(path, "-", 0)
    group = layer.get("group_size")
    # 2, 3, 4, 5, 6 and more.
    return Cell(path, f"{bits}/{group}" if group else f"{bits}", min(bits - 2, 5))


def _error(path: str, layer: dict) -> Cell:
    error = layer.get("error")
    if error is None:
        return Cell(path, "-", 0)
    decibels = -10 * math.log10(error) if error > 0 else math.inf
    shade = math.ceil((LEAST_DECIBELS - min(decibels, LEAST_DECIBELS)) / 5)
    return Cell(path, f"{100 * error:.2g}", min(shade, SHADES - 1))
