"""The standard streams: no text controls a terminal; a lost stream is no crash."""

import io
import json
import os
import subprocess
import sys

import pytest
from lmx.errors import UserError
from lmx.run import terminal
from lmx.run.terminal import ReaderGone, StreamedText, printable

# An emoji of joined people, and a mark of the direction of writing.
ORDINARY = "tab\tline\n \xe9 \u4e2d \U0001f468\u200d\U0001f469 \u0645\u200f \ufeff"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b[38;2;1;2;3mred\x9b0m", "red"),
        ("a\x1b]0;title\x07b\x1b]8;;http://x\x1b\\c\x9d52;c;aGk=\x9cd", "abcd"),
        ("\x1bPq#0\x1b\\\x1b_G\x1b\\\x1b^x\x1b\\\x1bXy\x1b\\z", "z"),
        ("\x1bc\x1b(B\x1b7\x1b#8z", "z"),
        ("a\rb\x07\x08\x00\x7f\x85\x0b\x0c", "ab"),
        ("\u202eevil\u202c \u2066x\u2069", "evil x"),
        ("one\u2028two\u2029three", "one\ntwo\nthree"),
        # A sequence without an end loses only what the terminal would act upon.
        ("\x1b]0;title", "0;title"),
        ("\x1b[" + "1" * 100 + "m", "1" * 100 + "m"),
        # What is removed leaves no new sequence behind.
        ("\x1b\x1b[0m[31m", "[31m"),
        ("\x1b\x07[31m\x1b\u202e]0;x\x07", "[31m]0;x"),
        (ORDINARY, ORDINARY),
    ],
)
def test_printable_removes_what_controls_a_terminal(text, expected):
    assert printable(text) == expected


@pytest.mark.parametrize(
    "text", ["\x1b[31mred\x1b[0m", "a\x1b]0;title\x1b\\b", "\x1b", "\x1b(Bx\x9b2", "é"]
)
def test_streamed_text_equals_printable_text_at_every_split(text, capsys):
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            output = StreamedText()
            for piece in (text[:first], text[first:second], text[second:]):
                output.write(piece)
            output.finish()
            assert capsys.readouterr().out == printable(text)


def test_streamed_text_holds_back_only_the_start_of_a_sequence(capsys):
    output = StreamedText()
    output.write("one \x1b[3")
    assert capsys.readouterr().out == "one "
    output.write("1m two")
    assert capsys.readouterr().out == " two"
    # A control string without an end is released.
    output.write("\x1b]" + "x" * 300)
    assert capsys.readouterr().out == "x" * 300


class Ascii(io.TextIOWrapper):
    def __init__(self):
        super().__init__(io.BytesIO(), encoding="ascii")

    def content(self):
        return self.buffer.getvalue().decode()


def test_ascii_output_escapes_other_characters(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Ascii())
    terminal.write_out("caf\xe9 \u4e2d\n")
    assert sys.stdout.content() == "caf\\xe9 \\u4e2d\n"


@pytest.mark.parametrize("stream", [Ascii, lambda: None], ids=["ascii", "utf-8"])
def test_json_keeps_every_character_and_prints_none_that_controls(
    stream, monkeypatch, capsys
):
    value = {"text": "\x1b[0m\x9b\x7f\u202e\u2028\ud800 caf\xe9 \U0001f600\r\n\t"}
    if replacement := stream():
        monkeypatch.setattr(sys, "stdout", replacement)
    terminal.write_json(value)
    terminal.write_json([value], indent=2)
    text = replacement.content() if replacement else capsys.readouterr().out
    assert printable(text) == text
    first, rest = text.split("\n", 1)
    assert json.loads(first) == value
    assert json.loads(rest) == [value]


def test_half_a_surrogate_pair_is_escaped(capsys):
    terminal.write_out("a\ud800\n")
    assert capsys.readouterr().out == "a\\ud800\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_output_ends_a_command_but_no_run(monkeypatch):
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(UserError, match="no space left on device") as caught:
            terminal.write_out("x")
        assert caught.value.code == 1
        terminal.write_out("x", tolerant=True)
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        terminal.write_out("x", tolerant=True)


def test_output_that_nobody_reads_is_told_apart(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(ReaderGone):
            terminal.write_out("x")


@pytest.mark.parametrize("closed", [False, True])
def test_missing_streams_are_no_crash(monkeypatch, closed):
    stream = io.StringIO()
    stream.close()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream if closed else None)
    with pytest.raises(UserError, match="bad file descriptor"):
        terminal.write_out("x")
    with pytest.raises(UserError, match="bad file descriptor"):
        terminal.write_json("x")
    terminal.write_out("x", tolerant=True)
    terminal.write_err("x")
    assert not terminal.output_is_terminal()


def test_reserved_streams_are_not_given_to_files(tmp_path):
    program = (
        "import sys; from lmx.run import terminal\n"
        "terminal.reserve_streams()\n"
        "with open(sys.argv[1], 'w') as file: assert file.fileno() > 2, file.fileno()"
    )
    shell = f'exec "$0" -c "{program}" "$1" <&- >&- 2>&-'
    command = ["sh", "-c", shell, sys.executable, str(tmp_path / "file")]
    assert subprocess.run(command, check=False).returncode == 0
    # The test can fail.
    without = [word.replace("terminal.reserve_streams()", "") for word in command]
    assert subprocess.run(without, check=False).returncode == 1


def test_a_crash_prints_no_escape_sequence(capsys):
    try:
        raise ValueError("\x1b[2Jboom")
    except ValueError as error:
        terminal.write_crash(ValueError, error, error.__traceback__)
    printed = capsys.readouterr().err
    assert "ValueError: boom" in printed
    assert "\x1b" not in printed
