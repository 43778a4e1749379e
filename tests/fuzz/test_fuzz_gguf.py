"""Damaged GGUF files: each one works or is refused in one sentence."""

import random
import struct
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from forked_cases import run_cases
from gguf_models import config_of
from json_mutations import damage_bytes, replace_file
from test_fuzz_model_folders import generate, use, write_folder
from tiny_checkpoints import LLAMA

# The tiny configs have keys of several families.
pytestmark = pytest.mark.filterwarnings("ignore:.*config.json")

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"}
SCALARS |= {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
STRANGE = [0, 1, 2, 3, 5, 7, 31, 10**4, 10**7, 2**31 - 1, 2**31, 2**32 - 1]
LENGTHS = [*STRANGE, 10**10, 2**40, 2**63 - 1, 2**63, 2**64 - 1]
TEXTS = [
    b"",
    b"llama",
    b"gpt2",
    b"bert",
    b"\xff\xfe",
    b"a" * 20_000,
    b"{% for x",
    b"\0",
]
TEXTS += [b"qwen2", b"qwen3", b"linear", b"yarn", b"default", b"smollm", b"{{ 1/0 }}"]
# Families with other tensors or with values that are computed from others.
FAMILIES = ("gemma2", "phi3 longrope", "qwen3_moe", "smollm3")
FLOATS = [0.0, -1.0, 1e-30, 1e30, float("nan"), float("inf")]


@dataclass
class Parts:
    """A file as its parts: metadata as key, type and bytes of the value."""

    magic: bytes
    version: int
    counts: list[int]
    metadata: list[tuple[bytes, int, bytes]]
    tensors: list[tuple[bytes, list[int], int, int]]
    data: bytes

    def write(self) -> bytes:
        head = self.magic + struct.pack("<I2Q", self.version, *self.counts)
        for key, kind, value in self.metadata:
            head += text(key) + struct.pack("<I", kind) + value
        for name, shape, kind, offset in self.tensors:
            head += text(name) + struct.pack("<I", len(shape))
            head += struct.pack(f"<{len(shape)}QIQ", *shape, kind, offset)
        return head + bytes(-len(head) % 32) + self.data


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def parse(data: bytes) -> Parts:
    """The parts of a sound file."""
    at = 24
    version, tensors, values = struct.unpack_from("<I2Q", data, 4)

    def take(size: int) -> bytes:
        nonlocal at
        at += size
        return data[at - size : at]

    def number(code: str) -> int:
        return struct.unpack(f"<{code}", take(struct.calcsize(code)))[0]

    def skip(kind: int) -> None:
        if kind == STRING:
            take(number("Q"))
        elif kind == ARRAY:
            inner, count = number("I"), number("Q")
            for _ in range(count):
                skip(inner)
        else:
            number(SCALARS[kind])

    metadata = []
    for _ in range(values):
        key, kind, start = take(number("Q")), number("I"), at
        skip(kind)
        metadata.append((key, kind, data[start:at]))
    infos = []
    for _ in range(tensors):
        name, size = take(number("Q")), number("I")
        shape = [number("Q") for _ in range(size)]
        infos.append((name, shape, number("I"), number("Q")))
    body = data[at + -at % 32 :]
    return Parts(data[:4], version, [tensors, values], metadata, infos, body)


def strange_value(rng: random.Random, kind: int) -> bytes:
    """Bytes of a value of a type that fit to nothing else."""
    if kind == STRING:
        return text(rng.choice(TEXTS))
    if kind == ARRAY:
        inner = rng.choice([0, 4, 5, 6, STRING, ARRAY, 99])
        count = rng.choice([0, 1, 3, 320, *LENGTHS])
        given = min(count, 3)
        if inner == ARRAY and rng.random() < 0.5:
            return struct.pack("<IQ", ARRAY, 1) * rng.choice([5, 2000]) + bytes(12)
        values = b"".join(strange_value(rng, inner) for _ in range(given))
        return struct.pack("<IQ", inner, count) + values
    code = SCALARS.get(kind, "I")
    if code in "fd":
        return struct.pack(f"<{code}", rng.choice(FLOATS))
    size = struct.calcsize(code)
    number = rng.choice(LENGTHS) % 2 ** (8 * size)
    return number.to_bytes(size, "little")


def mutate_metadata(rng: random.Random, parts: Parts) -> str:
    at = rng.randrange(len(parts.metadata))
    key, kind, value = parts.metadata[at]
    draw = rng.random()
    if draw < 0.45:
        kind = kind if rng.random() < 0.6 else rng.choice([*SCALARS, 8, 9, 13, 2**31])
        value = strange_value(rng, kind)
    elif draw < 0.6:
        value = damage_bytes(rng, value)
    elif draw < 0.7:
        kind = rng.choice([*SCALARS, 8, 9, 13])
    elif draw < 0.8:
        key = damage_bytes(rng, key)
    elif draw < 0.9 and kind in (STRING, ARRAY):
        start = 0 if kind == STRING else 4
        length = struct.pack("<Q", rng.choice(LENGTHS))
        value = value[:start] + length + value[start + 8 :]
    else:
        del parts.metadata[at]
        if rng.random() < 0.8:
            parts.counts[1] -= 1
        return f"{key[:60]!r} removed"
    parts.metadata[at] = (key, kind, value)
    return f"{key[:60]!r} type {kind} = {value[:40]!r}"


def add_metadata(rng: random.Random, parts: Parts) -> str:
    key, kind = rng.choice(
        [
            (b"general.alignment", 4),
            (b"general.alignment", 10),
            (b"split.count", 2),
            (b"split.count", STRING),
            (b"llama.rope.scaling.type", STRING),
            (b"llama.rope.scaling.factor", 6),
            (b"llama.expert_count", 4),
            (b"llama.rope.dimension_count", 4),
            (b"tokenizer.ggml.bos_token_id", 4),
            (b"tokenizer.ggml.add_bos_token", 7),
            (b"tokenizer.ggml.scores", ARRAY),
            (b"tokenizer.chat_template", STRING),
            (b"a" * 300, ARRAY),
        ]
    )
    parts.metadata.append((key, kind, strange_value(rng, kind)))
    parts.counts[1] += 1
    return f"{key[:40]!r} added, {parts.metadata[-1][2][:40]!r}"


def mutate_tensor(rng: random.Random, parts: Parts) -> str:
    at = rng.randrange(len(parts.tensors))
    name, shape, kind, offset = parts.tensors[at]
    draw = rng.random()
    if draw < 0.35:
        sizes = [*LENGTHS, 64, 128, 320, 96]
        shape = rng.choice(
            [
                [],
                [*shape, 1],
                shape[::-1],
                shape[:1],
                [rng.choice(sizes) for _ in shape],
                [rng.choice(sizes), *shape[1:]],
                [*shape[:-1], rng.choice(sizes)],
                [1] * 5,
                [1] * 1000,
            ]
        )
    elif draw < 0.55:
        kind = rng.choice([0, 1, 2, 3, 6, 7, 8, 10, 12, 13, 14, 30, 99, 2**32 - 1])
    elif draw < 0.7:
        offset = rng.choice([*LENGTHS, offset + 1, offset - 32]) % 2**64
    elif draw < 0.85:
        names = [b"", b"output.weight", b"blk.9.attn_q.weight", b"rope_freqs.weight"]
        names += [b"blk.0.attn_q.bias", b"blk.99999999.ffn_up.weight", b"x" * 500]
        names += [damage_bytes(rng, name), rng.choice(parts.tensors)[0]]
        name = rng.choice(names)
    else:
        del parts.tensors[at]
        parts.counts[0] -= rng.random() < 0.8
        return f"{name!r} removed"
    parts.tensors[at] = (name, shape, kind, offset)
    return f"{name[:60]!r} {shape[:5]} type {kind} at {offset}"


def mutate_header(rng: random.Random, parts: Parts) -> str:
    draw = rng.random()
    if draw < 0.2:
        parts.magic = rng.choice([b"GGML", b"FUGG", b"\0\0\0\0", b"PK\3\4"])
    elif draw < 0.4:
        parts.version = rng.choice([0, 1, 2, 4, 2**31, 2**32 - 1])
    else:
        parts.counts[rng.randrange(2)] = rng.choice(LENGTHS)
    return f"{parts.magic} {parts.version} {parts.counts}"


MUTATIONS = [mutate_metadata] * 4 + [add_metadata, mutate_header] + [mutate_tensor] * 3


def damage(rng: random.Random, file: Path) -> list[str]:
    """Damage a file in one or several ways."""
    draw = rng.random()
    if draw < 0.25:
        file.write_bytes(damage_bytes(rng, file.read_bytes()))
        return ["bytes"]
    if draw < 0.28:
        return [replace_file(rng, file)]
    parts = parse(file.read_bytes())
    if draw < 0.38:
        # A header is a thousandth of the file, so that few bits hit it.
        whole = parts.write()
        size = len(whole) - len(parts.data)
        file.write_bytes(damage_bytes(rng, whole[:size]) + parts.data)
        return ["bytes of the header"]
    count = rng.choice([1, 1, 1, 2, 3])
    done = [rng.choice(MUTATIONS)(rng, parts) for _ in range(count)]
    file.write_bytes(parts.write())
    return done


def run_case(seed: str, bases: list[str]) -> str:
    """Damage a file, then generate, check a recipe and convert with it."""
    rng = random.Random(seed)
    with TemporaryDirectory() as scratch:
        file = Path(scratch) / "model.gguf"
        base = rng.choice(bases)
        file.write_bytes(Path(base).read_bytes())
        done = damage(rng, file)
        try:
            return use(file, rng)
        except BaseException as error:
            error.add_note(f"{Path(base).name}: {'; '.join(done)}")
            raise


@pytest.fixture(scope="session")
def bases(tmp_path_factory, tokenizer_folder) -> list[str]:
    """Tiny files: of 16 bits, of codes of 4 and 5 bits, and of other families."""
    from lmx.convert.gguf.writer import write
    from lmx.models.loader import load

    root, files = tmp_path_factory.mktemp("gguf"), []
    config = LLAMA | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    for bits in (None, 4, 5):
        folder = root / f"folder-{bits}"
        write_folder(folder, config, tokenizer_folder, bits)
        file = root / f"bits-{bits}.gguf"
        write(file, load(folder, compute="stored"), name="tiny")
        assert parse(file.read_bytes()).write() == file.read_bytes()
        files.append(str(file))
    for name in FAMILIES:
        folder, file = root / name, root / f"{name}.gguf"
        write_folder(folder, config_of(name), tokenizer_folder, None)
        write(file, load(folder, compute="stored"), name="tiny")
        files.append(str(file))
    return files


def test_damaged_gguf_files_work_or_are_refused(bases, num_cases, request):
    seed = request.config.getoption("--fuzz-seed")
    seeds = [f"{seed} {number}" for number in range(num_cases(20))]
    outcomes = run_cases("test_fuzz_gguf", seeds, bases=bases)
    assert outcomes["refused"] > len(seeds) // 5, outcomes
    assert outcomes["worked"] > len(seeds) // 40, outcomes


def run_sound_case(seed: str, bases: list[str]) -> str:
    """Use a file as it is."""
    with TemporaryDirectory() as scratch:
        file = Path(scratch) / "model.gguf"
        file.write_bytes(Path(bases[int(seed)]).read_bytes())
        return generate(file)


def test_sound_gguf_files_work(bases):
    """Else the fuzzer would only see refusals."""
    outcomes = run_cases(
        "test_fuzz_gguf", list("0123456"), "run_sound_case", bases=bases
    )
    assert outcomes == {"worked": 7}
