"""Tables of the bits and the errors of a model's layers, with shades."""

import math
import re
from typing import Any

from .blocks import Block, table

BLOCK_PATH = re.compile(r"^.*?\.(\d+)\.(.+)$")
DARKEST = 5
# Signal-to-error ratio of the lightest shade; each darker shade has 5 dB less.
LIGHTEST_DECIBELS = 30
BITS = "Bits / group size. Darker cells have more bits."
ERROR = (
    "Squared error of the weights in % of their squared norm. "
    "Darker cells have a larger error."
)


def layer_maps(models: dict[str, dict]) -> list[Block]:
    """The maps of every model with measured layers.

    A map has a row for each block of layers. Other layers have a table of their own.
    """
    blocks: list[Block] = []
    for model, figures in models.items():
        layers = figures.get("layers") or {}
        maps = [("Bits per layer", BITS, _bits)]
        if any(layer.get("error") is not None for layer in layers.values()):
            maps.append(("Relative weight error", ERROR, _error))
        inside, outside = {}, []
        for path, layer in layers.items():
            cells = [cell(layer) | {"title": path} for *_, cell in maps]
            if match := BLOCK_PATH.match(path):
                inside[int(match[1]), match[2]] = cells
            else:
                outside.append([path, *cells])
        names = sorted({name for _, name in inside})
        numbers = sorted({number for number, _ in inside})
        tables = []
        for i, (title, note, _) in enumerate(maps if inside else []):
            rows = [
                [str(n), *(inside[n, k][i] if (n, k) in inside else "" for k in names)]
                for n in numbers
            ]
            caption = f"{title}, {model}. {note}"
            tables.append(table(caption, ["block", *names], rows, "map"))
        if outside:
            columns = ["layer", *(title for title, *_ in maps)]
            caption = f"Non-block layers, {model}. Errors in %."
            tables.append(table(caption, columns, outside, "map outside"))
        if tables:
            blocks.append({"type": "group", "kind": "maps", "blocks": tables})
    return blocks


def _bits(layer: dict) -> dict[str, Any]:
    bits, group = layer.get("bits"), layer.get("group_size")
    if bits is None:
        return _cell("-", 0)
    # 2, 3, 4, 5, 6 and more.
    return _cell(f"{bits}/{group}" if group else f"{bits}", bits - 2)


def _error(layer: dict) -> dict[str, Any]:
    error = layer.get("error")
    if error is None or not math.isfinite(error):
        return _cell("-", 0)
    decibels = -10 * math.log10(error) if error > 0 else LIGHTEST_DECIBELS
    return _cell(f"{100 * error:.2g}", math.ceil((LIGHTEST_DECIBELS - decibels) / 5))


def _cell(text: str, shade: int) -> dict[str, Any]:
    return {"text": text, "kind": f"shade-{max(0, min(shade, DARKEST))}"}
