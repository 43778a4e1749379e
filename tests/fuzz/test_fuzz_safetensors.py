"""Damaged safetensors files: every reader refuses what the format forbids.

An independent reader, written from the description of the format, says which files are
sound, and which values they hold.
"""

import json
import os
import random
import shutil
import socket
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
from damaged_safetensors import join, read
from forked_cases import run_cases
from lmx.convert.gguf import k_blocks
from lmx.convert.importers import peft
from lmx.errors import UserError
from lmx.models.checkpoint import checkpoint_size
from lmx.models.drafters.io import load_drafter
from lmx.models.loader import check_loadable, load
from lmx.models.safetensors_io import (
    DTYPE_NAMES,
    read_header,
    read_tensors,
    require_finite,
)
from test_fuzz_model_folders import require_sentence

SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2}
SIZES |= {"I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "C64": 8}
SIZES |= {"F8_E4M3": 1, "F8_E8M0": 1}
TYPES = [*SIZES, "F64", "F4", "F8_E5M2", "XX", "", "f16", None, 3]
NUMBERS = [0, 1, -1, 2, 7, 64, 2**31, 2**32, 2**53, 2**62, 2**64 - 1, 2**64, 10**30]
NUMBERS += [1.0, 0.5, True, None, "1", [], {}]
MAX_HEADER = 100_000_000


class Unsound(Exception):
    """The format forbids this file, or MLX has no such tensor."""


def require(condition: Any) -> None:
    if not condition:
        raise Unsound


def sound_tensors(data: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Type, shape and bytes of every tensor, or `Unsound`."""
    require(len(data) >= 8)
    length = int.from_bytes(data[:8], "little")
    require(length <= min(MAX_HEADER, len(data) - 8))

    def unique(pairs):
        require(len({key for key, _ in pairs}) == len(pairs))
        return dict(pairs)

    def no_constant(_):
        raise Unsound

    try:
        text = data[8 : 8 + length].decode("utf-8")
        header = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
        json.dumps(header, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError):
        raise Unsound from None
    require(isinstance(header, dict))
    metadata = header.pop("__metadata__", None)
    if metadata is not None:
        require(isinstance(metadata, dict))
        require(all(isinstance(value, str) for value in metadata.values()))
    body, tensors, ranges = data[8 + length :], {}, []
    for name, tensor in header.items():
        require(isinstance(tensor, dict))
        dtype, shape, ends = map(tensor.get, ("dtype", "shape", "data_offsets"))
        require(isinstance(dtype, str) and dtype in SIZES)
        require(isinstance(shape, list) and all(type(n) is int for n in shape))
        require(all(0 <= n < 2**31 for n in shape))
        require(isinstance(ends, list) and len(ends) == 2)
        require(all(type(n) is int and 0 <= n < 2**64 for n in ends))
        require(ends[1] - ends[0] == prod(shape) * SIZES[dtype])
        tensors[name] = dtype, tuple(shape), body[slice(*ends)]
        ranges.append(ends)
    end = 0
    for start, next_end in sorted(ranges):
        require(start == end)
        end = next_end
    require(end == len(body))
    return tensors


def changed_number(rng: random.Random, value: int) -> Any:
    nearby = [value + 1, value - 1, value + 8, -value, 2 * value]
    return rng.choice([*nearby, *nearby, *NUMBERS])


def damage_header(rng: random.Random, data: bytes) -> bytes:
    header, body = read(data)
    names = [name for name in header if name != "__metadata__"]
    for _ in range(rng.choice([1, 1, 2])):
        name, other = rng.choice(names), rng.choice(names)
        tensor = header.setdefault(name, dict(header.get(other, {})))
        kind = rng.randrange(12)
        if kind == 0:
            tensor["dtype"] = rng.choice(TYPES)
        elif kind == 1 and tensor.get("shape"):
            at = rng.randrange(len(tensor["shape"]))
            tensor["shape"][at] = changed_number(rng, tensor["shape"][at])
        elif kind == 2:
            tensor["shape"] = rng.choice([[], None, [0], [-1, -1], 7, [[1]], "4"])
        elif kind in (3, 4) and isinstance(tensor.get("data_offsets"), list):
            at = rng.randrange(2)
            tensor["data_offsets"][at] = changed_number(rng, tensor["data_offsets"][at])
        elif kind == 5:
            tensor["data_offsets"] = rng.choice([None, [], [0], 4, [0, 0, 0], "0"])
        elif kind in (6, 7) and other in header:
            # They share bytes, or the bytes change their places.
            ranges = tensor.get("data_offsets"), header[other].get("data_offsets")
            tensor["data_offsets"] = ranges[1]
            if kind == 7:
                header[other]["data_offsets"] = ranges[0]
        elif kind == 8:
            del header[name]
        elif kind == 9:
            header[rng.choice(["", "x", f"{name}.x", "\ud800", "\0"])] = header.pop(
                name
            )
        elif kind == 10:
            values = [None, {}, {"a": "b"}, {"a": 1}, [], "x", {"format": "pt"}]
            header["__metadata__"] = rng.choice(values)
        else:
            # Sound: the order of the header is free.
            header = dict(rng.sample([*header.items()], len(header)))
    return join(header, body)


def damage_bytes(rng: random.Random, data: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    text, body = data[8 : 8 + length], data[8 + length :]
    kind = rng.randrange(10)
    if kind == 0:
        return data[: rng.randrange(len(data) + 1)]
    if kind == 1:
        return data + bytes(rng.choice([1, 8, 4096]))
    if kind == 2:
        number = rng.choice([0, length - 1, length + 1, 2**31, 2**63, 2**64 - 1])
        return struct.pack("<Q", number) + data[8:]
    if kind == 3:
        padded = text + b" " * rng.choice([1, 8, 64])  # sound
        return struct.pack("<Q", len(padded)) + padded + body
    if kind == 4:
        texts = [
            b"null",
            b"[]",
            b"{}",
            b"7",
            b"[" * 10**5,
            b"{" * 300,
            b"\xff\xfe",
            b"",
        ]
        texts += [text.decode().encode("utf-16"), b"\xef\xbb\xbf" + text, text[:-2]]
        texts += [text.rstrip()[:-1] + b', "a": NaN}', b"{}" * 2]
        texts += [text.rstrip()[:-1] + b"," + text.strip()[1:]]
        text = rng.choice(texts)
        return struct.pack("<Q", len(text)) + text + body
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 3])):
        at = rng.randrange(8 + length if kind < 9 else len(data))
        changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed)


def put_something_else(rng: random.Random, file: Path) -> None:
    """What is no regular file of this folder."""
    content = file.read_bytes()
    file.unlink()

    def make_socket() -> None:
        # Its path has a limited length.
        here = os.getcwd()
        os.chdir(file.parent)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(file.name)
        os.chdir(here)

    def make_sparse() -> None:
        file.write_bytes(content)
        os.truncate(file, 1 << 40)

    kinds: list[Callable[[], Any]] = [
        lambda: os.mkfifo(file),
        lambda: file.mkdir(),
        lambda: file.symlink_to("/dev/zero"),
        lambda: file.symlink_to("/dev/null"),
        lambda: file.symlink_to(file.name),
        lambda: file.symlink_to("nothing"),
        make_socket,
        make_sparse,
    ]
    rng.choice(kinds)()


def damage(rng: random.Random, file: Path) -> bool:
    """Damage a file; returns whether it is still sound."""
    if rng.random() < 0.15:
        put_something_else(rng, file)
        return False
    change = damage_header if rng.random() < 0.6 else damage_bytes
    file.write_bytes(change(rng, file.read_bytes()))
    try:
        sound_tensors(file.read_bytes())
    except Unsound:
        return False
    return True


def read_alone(file: Path) -> None:
    """Sound files give the values that they hold."""
    header, tensors = read_header(file), read_tensors(file)
    expected = sound_tensors(file.read_bytes())
    assert header == {n: (dtype, shape) for n, (dtype, shape, _) in expected.items()}
    assert tensors.keys() == expected.keys()
    for name, (dtype, shape, data) in expected.items():
        value = tensors[name]
        assert value.shape == shape
        assert DTYPE_NAMES.get(value.dtype, dtype) in (dtype, "U8")
        raw = np.array(mx.contiguous(value).reshape(-1).view(mx.uint8))
        assert raw.tobytes() == data, name


def generate(file: Path) -> None:
    load(file.parent)


def check_weights(file: Path) -> None:
    """As before a training, a quantization and an export."""
    require_finite(file.parent)


def count_blocks(file: Path) -> None:
    k_blocks.count_layers(file.parent)


def dry_run(file: Path) -> None:
    check_loadable(file.parent)
    checkpoint_size(file.parent)


def load_adapter(file: Path) -> None:
    load(file.parents[2] / "base", lazy=True, adapter=file.parent)


def import_peft(file: Path) -> None:
    peft.read(file.parent)


def draft(file: Path) -> None:
    load_drafter(file.parent, load(file.parents[2] / "base", lazy=True).model)


# Readers, and the file that each one gets.
READERS: list[tuple[Callable[[Path], None], str]] = [
    *5 * [(read_alone, "adapters/lora/adapters.safetensors")],
    *2 * [(generate, "base/model-1.safetensors")],
    (check_weights, "base/model-2.safetensors"),
    (count_blocks, "base/gguf_scales.safetensors"),
    (dry_run, "base/model-2.safetensors"),
    *2 * [(load_adapter, "adapters/lora/adapters.safetensors")],
    (import_peft, "adapters/peft/adapter_model.safetensors"),
    (draft, "drafters/eagle3/model.safetensors"),
]


def run_case(seed: str, folders: dict[str, str]) -> str:
    """Damage a file, and read it with one of its readers."""
    rng = random.Random(seed)
    reader, name = rng.choice(READERS)
    with TemporaryDirectory() as scratch:
        root = Path(scratch) / "root"
        for part in (name.split("/")[0], "base"):
            shutil.copytree(folders[part], root / part, dirs_exist_ok=True)
        file = root / name
        try:
            is_sound = damage(rng, file)
            reader(file)
        except UserError as error:
            require_sentence(error)
            return "refused"
        except BaseException as error:
            error.add_note(f"{reader.__name__}: {name}")
            raise
        assert is_sound, f"{reader.__name__} took an unsound file for a sound one"
        return "worked"


def test_damaged_weights_are_refused(folders, num_cases, request):
    seed = request.config.getoption("--fuzz-seed")
    seeds = [f"{seed} {number}" for number in range(num_cases(160))]
    outcomes = run_cases("test_fuzz_safetensors", seeds, folders=folders)
    assert outcomes["refused"] > len(seeds) // 2, outcomes
    assert outcomes["worked"] > len(seeds) // 20, outcomes


def test_sound_weights_are_read(folders):
    """Else the fuzzer would only see refusals."""
    for reader, name in dict.fromkeys(READERS):
        part, rest = name.split("/", 1)
        reader(Path(folders[part]) / rest)
