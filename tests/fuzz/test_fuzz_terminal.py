"""Random text with escape sequences, in random pieces: no byte controls a terminal."""

import io
import json
import random
import string
from collections.abc import Callable
from contextlib import redirect_stdout

import pytest
from lmx.run import terminal
from lmx.run.terminal import StreamedText, printable

ORDINARY = [
    *string.ascii_letters,
    *string.digits,
    *string.punctuation,
    *" \t\n",
    *"\xe9\xdf\u4e2d\u0645\u200f\u200d\ufeff\U0001f468\U0001f600",
]
CONTROLS = [
    *map(chr, [*range(9), *range(0x0B, 0x1B), *range(0x1C, 0x20), 0x7F, 0x85, 0x9C]),
    *map(chr, [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]),
]
# Parts of sequences, alone or in any order.
PARTS = ["\x1b", "\x1b[", "\x1b]", "\x1bP", "\x1b\\", "\x9b", "\x9d", "\x07", "\x9c"]
PARTS += ["[", "]", "m", ";", "0", "31", "?25", "title", "\r", "\n", "\u2028", "\ud800"]
# What a terminal acts upon, in bytes of UTF-8 as well as of one byte per character.
BYTES = {*range(9), *range(0x0B, 0x20), 0x7F}
CHARACTERS = {*range(0x80, 0xA0), *range(0x2028, 0x202F), *range(0x2066, 0x206A)}


def choices(chance: random.Random, items: list[str], most: int) -> str:
    return "".join(chance.choices(items, k=chance.randrange(most + 1)))


def complete_sequence(chance: random.Random) -> str:
    """A sequence with its end, so that it cannot go on in the text after it."""
    content = choices(chance, list(string.ascii_letters + string.digits + ";:/?"), 200)
    end = chance.choice(["\x07", "\x9c", "\x1b\\"])
    parameters = choices(chance, list("0123456789:;<=>?"), 40)
    final = chance.choice(list(string.ascii_letters + "@`~{}"))
    return chance.choice(
        [
            chance.choice(["\x1b[", "\x9b"]) + parameters + final,
            chance.choice([*"\x90\x98\x9d\x9e\x9f"]) + content + end,
            "\x1b" + chance.choice([*"]PX^_"]) + content + end,
            "\x1b" + choices(chance, list(" #%()*+"), 3) + chance.choice([*"789=>cMB"]),
        ]
    )


def pieces(chance: random.Random, text: str) -> list[str]:
    """The text, cut at random places; some pieces are empty."""
    cuts = sorted(chance.choices(range(len(text) + 1), k=chance.randrange(12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


class Output:
    """A standard output that keeps its raw bytes."""

    def __init__(self, encoding: str):
        self.encoding = encoding

    def bytes_of(self, write: Callable, *arguments) -> bytes:
        """What a function writes."""
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding=self.encoding, newline="\n")
        with redirect_stdout(stream):
            write(*arguments)
        return raw.getvalue()

    def encoded(self, text: str) -> bytes:
        return text.encode(self.encoding, "backslashreplace")


def controls(raw: bytes, encoding: str) -> set[int]:
    """The bytes and characters that a terminal would act upon."""
    return set(raw) & BYTES | {ord(c) for c in raw.decode(encoding)} & CHARACTERS


@pytest.fixture(params=["utf-8", "ascii", "latin-1"])
def output(request):
    return Output(request.param)


def stream(parts: list[str]) -> None:
    streamed = StreamedText()
    for part in parts:
        streamed.write(part)
    streamed.finish()


def test_fuzz_streamed_text_controls_nothing(output, num_cases, fuzz_random):
    for case in range(num_cases(500)):
        parts = [*PARTS * 3, *CONTROLS, *ORDINARY]
        text = choices(fuzz_random, parts, 60)
        raw = output.bytes_of(stream, pieces(fuzz_random, text))
        assert not controls(raw, output.encoding), (case, text)
        assert raw == output.encoded(printable(text)), (case, text)


def test_fuzz_only_sequences_and_controls_are_lost(output, num_cases, fuzz_random):
    for case in range(num_cases(500)):
        text, expected = "", ""
        for _ in range(fuzz_random.randrange(20)):
            kind = fuzz_random.randrange(3)
            if kind == 0:
                word = choices(fuzz_random, ORDINARY, 8)
                text, expected = text + word, expected + word
            elif kind == 1:
                text += fuzz_random.choice(CONTROLS)
            else:
                text += complete_sequence(fuzz_random)
        raw = output.bytes_of(stream, pieces(fuzz_random, text))
        assert raw == output.encoded(expected), (case, text)


def test_fuzz_json_keeps_every_character(output, num_cases, fuzz_random):
    parts = [*PARTS, *CONTROLS, *ORDINARY, "\udc9b", "\u2029"]
    for case in range(num_cases(500)):
        record = {choices(fuzz_random, parts, 9): choices(fuzz_random, parts, 30)}
        raw = output.bytes_of(terminal.write_json, record)
        assert not controls(raw, output.encoding), (case, record)
        # Two halves of a pair that meet are one character in JSON.
        expected = json.loads(json.dumps(record))
        assert json.loads(raw.decode(output.encoding)) == expected, (case, record)


def test_the_raw_bytes_of_hostile_text_are_found(output):
    # Negative control: text that is written as it is.
    for text in ("\x1b[2J", "\x07", "\r", "\x7f"):
        assert controls(text.encode(output.encoding), output.encoding)
    if output.encoding == "utf-8":
        assert controls("\x9b2J".encode(), "utf-8")
        assert controls("\u202e".encode(), "utf-8")
