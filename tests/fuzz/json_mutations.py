"""Damage of JSON values and of files, for the fuzzers of model folders and GGUF."""

import copy
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

STRANGE = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 33, 10**4, 10**7, 10**9, 2**31, 2**32),
    *(2**63, 2**64 - 1, 10**30, -(2**63), 0.0, -0.5, 1.5, 1e308, float("nan")),
    *(float("inf"), "", "x", "0", "12", "none", "llama", "\ud800", "\0", "../../x"),
    *("a" * 5000, [], [0], [-1], [None], ["x"], [1, [2, [3]]], {}, {"a": 1}),
    *({"type": "x"}, {"type": "Sequence"}, {"model_type": "llama"}, {"": {}}),
]


def strange_value(rng: random.Random) -> Any:
    """A value that is wrong nearly everywhere."""
    if rng.random() < 0.03:
        value: Any = rng.choice([0, "x"])
        for _ in range(rng.choice([5, 100, 900])):
            value = [value] if rng.random() < 0.5 else {"a": value}
        return value
    return copy.deepcopy(rng.choice(STRANGE))


def mutate_json(rng: random.Random, value: Any) -> Any:
    """A copy in which one value is replaced, removed, doubled, nested or renamed."""
    value = copy.deepcopy(value)
    if not isinstance(value, dict | list) or not value or rng.random() < 0.02:
        return strange_value(rng)
    parent = value
    while True:
        keys = list(parent) if isinstance(parent, dict) else range(len(parent))
        key = rng.choice(list(keys))
        child = parent[key]
        if not (isinstance(child, dict | list) and child) or rng.random() < 0.3:
            break
        parent = child
    _change(rng, parent, key)
    return value


def _change(rng: random.Random, parent: Any, key: Any) -> None:
    child, draw = parent[key], rng.random()
    if draw < 0.15:
        del parent[key]
    elif draw < 0.25 and isinstance(child, int | float) and abs(child) < 1e15:
        step = rng.choice([-1, 1, -child, child, 1000 * child, 0.5 - child])
        parent[key] = child + step
    elif draw < 0.30:
        parent[key] = str(child)
    elif draw < 0.35:
        parent[key] = rng.choice([[child], {"value": child}, [child] * 3])
    elif draw < 0.40 and isinstance(parent, dict):
        parent[rng.choice(["", "x", f"{key}s", key.upper()])] = parent.pop(key)
    elif draw < 0.45:
        siblings = parent.values() if isinstance(parent, dict) else parent
        parent[key] = copy.deepcopy(rng.choice(list(siblings)))
    else:
        parent[key] = strange_value(rng)


def dump_json(file: Path, value: Any) -> None:
    """Write JSON, with the escapes and the non-finite numbers of Python."""
    file.write_text(json.dumps(value))


def damage_bytes(rng: random.Random, data: bytes) -> bytes:
    """A copy that is cut, longer, or has other bits, bytes or parts."""
    size = len(data)
    at = rng.randrange(size + 1)
    kind = rng.choice(["cut", "flip", "noise", "insert", "remove", "zeros", "empty"])
    if kind == "cut":
        return data[:at]
    if kind == "empty":
        return rng.choice([b"", b"\n", b"null", b"{}", b"[]", b"\xff\xfe", b"0" * 9])
    changed = bytearray(data)
    if kind == "flip" and size:
        for _ in range(rng.choice([1, 1, 4, 64])):
            changed[rng.randrange(size)] ^= 1 << rng.randrange(8)
    elif kind == "noise":
        changed[at : at + 8] = rng.randbytes(8)
    elif kind == "zeros":
        changed[at : at + 64] = bytes(64)
    elif kind == "insert":
        changed[at:at] = rng.randbytes(rng.choice([1, 8, 100]))
    else:
        del changed[at : at + rng.choice([1, 8, 100])]
    return bytes(changed)


def replace_file(rng: random.Random, file: Path) -> str:
    """Put something else than a file of content in place of a file."""
    others = sorted(p for p in file.parent.iterdir() if p.is_file() and p != file)
    other = rng.choice(others or [file])
    content = other.read_bytes()

    def write_sparse() -> None:
        with file.open("wb") as stream:
            stream.truncate(rng.choice([1 << 30, 1 << 42]))

    kinds: dict[str, Callable[[], Any]] = {
        "missing": lambda: None,
        "folder": lambda: file.mkdir(),
        "pipe": lambda: os.mkfifo(file),
        "sparse": write_sparse,
        "link outside": lambda: file.symlink_to("/etc/hostname"),
        "link to nothing": lambda: file.symlink_to("nothing.json"),
        "link to itself": lambda: file.symlink_to(file.name),
        "link to another": lambda: file.symlink_to(other.name),
        "another's content": lambda: file.write_bytes(content),
    }
    kind = rng.choice(list(kinds))
    file.unlink()
    kinds[kind]()
    return kind
