"""Parameters, bytes and bits per weight of a checkpoint, from its files' headers."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError


@dataclass(frozen=True)
class Sizes:
    """What a checkpoint weighs; a quantized weight counts as one parameter."""

    parameters: int
    bytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / self.parameters


def checkpoint_sizes(folder: Path) -> Sizes:
    """Count without loading any weight.

    Raises:
        UserError: a weight file is damaged.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = {}
    for file in sorted(folder.glob("model*.safetensors")):
        tensors |= read_header(file)
    quantization = config.get("quantization") or {}
    parameters = 0
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        is_packed = f"{path}.scales" in tensors
        if is_packed and leaf in ("scales", "biases"):
            continue
        count = math.prod(tensor["shape"])
        if is_packed and leaf == "weight":
            own = quantization.get(path)
            bits = (own if isinstance(own, dict) else quantization)["bits"]
            count = count * 32 // bits
        parameters += count
    places = [tensor["data_offsets"] for tensor in tensors.values()]
    size = sum(end - start for start, end in places)
    return Sizes(parameters, size)


def read_header(file: Path) -> dict[str, dict]:
    """Type, shape and place of every tensor in a safetensors file, by name.

    Raises:
        UserError: the file is cut short or is something else.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(length, 100 << 20)))
        header.pop("__metadata__", None)
        ends = [tensor["data_offsets"][1] for tensor in header.values()]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            "this is no safetensors file, or it is damaged", place=str(file)
        ) from error
    end = 8 + length + max(ends, default=0)
    if file.stat().st_size < end:
        raise UserError(
            f"the file is cut short: {file.stat().st_size:,} of {end:,} bytes",
            place=str(file),
        )
    return header
