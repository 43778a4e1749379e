"""Safetensors files that the format forbids, made from a sound one."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

Header = dict[str, dict]


def read(data: bytes) -> tuple[Header, bytes]:
    """The header and the bytes of the tensors."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(header: Header, body: bytes) -> bytes:
    """A file of a header and the bytes of the tensors."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def _overlap(header: Header, body: bytes) -> bytes:
    """Two tensors of one size share their bytes."""
    tensors = list(header.values())
    sizes = [(t["dtype"], t["shape"]) for t in tensors]
    first = next(n for n, size in enumerate(sizes) if sizes.count(size) > 1)
    second = sizes.index(sizes[first], first + 1)
    tensors[second]["data_offsets"] = tensors[first]["data_offsets"]
    return join(header, body)


def _hole(header: Header, body: bytes) -> bytes:
    for tensor in header.values():
        tensor["data_offsets"] = [64 + end for end in tensor["data_offsets"]]
    return join(header, bytes(64) + body)


def _changed(**values) -> Callable[[Header, bytes], bytes]:
    def change(header: Header, body: bytes) -> bytes:
        header[next(iter(header))].update(values)
        return join(header, body)

    return change


def _without_a_tensor(header: Header, body: bytes) -> bytes:
    del header[next(iter(header))]
    return join(header, body)


DAMAGES: dict[str, Callable[[Header, bytes], bytes]] = {
    "overlap": _overlap,
    "hole": _hole,
    "tensor that the header lacks": _without_a_tensor,
    "type of another size": _changed(dtype="I64"),
    "type that MLX lacks": _changed(dtype="F4"),
    "unknown type": _changed(dtype="XX"),
    "other shape": _changed(shape=[3, 5]),
    "range beyond the file": _changed(data_offsets=[2**62, 2**62 + 2]),
    "cut short": lambda header, body: join(header, body[:-1]),
    "longer": lambda header, body: join(header, body + b"\0"),
    "cut in the header": lambda header, body: join(header, body)[:40],
    "no header": lambda header, body: bytes(8),
    "empty": lambda header, body: b"",
    "length beyond the file": lambda header, body: b"\xff" * 8 + b"{}",
}


def damage(file: Path, kind: str) -> None:
    """Damage a sound file."""
    header, body = read(file.read_bytes())
    header.pop("__metadata__", None)
    file.write_bytes(DAMAGES[kind](header, body))
