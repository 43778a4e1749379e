"""Parameters, bytes and bits per weight of a checkpoint, from its files' headers."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError

# Bytes of a number of each type a safetensors file may name; of others, MLX's to say.
WIDTHS = dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1)
WIDTHS |= dict.fromkeys(("U16", "I16", "F16", "BF16"), 2)
WIDTHS |= dict.fromkeys(("U32", "I32", "F32"), 4)
WIDTHS |= dict.fromkeys(("U64", "I64", "F64", "C64"), 8)


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
        broken = [name for name, tensor in header.items() if not _is_sound(tensor)]
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
    if broken:
        raise UserError(
            f"the file is damaged: {broken[0]} has a shape of other bytes than its own",
            place=str(file),
        )
    return header


def _is_sound(tensor: dict) -> bool:
    """Whether a tensor's place in the file is as long as its type and shape say."""
    start, end = tensor["data_offsets"]
    width = WIDTHS.get(tensor["dtype"])
    size = math.prod(tensor["shape"])
    is_known = 0 <= start <= end and min(tensor["shape"], default=0) >= 0
    return is_known and (width is None or end - start == size * width)
