"""Commands whose output is lost: a message, the right exit code and no traceback."""

import io
import os
import sys

import pytest
from lmx.cli import main

COMMANDS = [
    ["--help"],
    ["--version"],
    ["schema"],
    ["schema", "--json"],
    ["recipes"],
    ["train", "--list"],
    ["train", "--help"],
]
each_command = pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux only")


@needs_full
@each_command
def test_full_output_exits_1(argv, monkeypatch, capsys):
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main.main(argv) == 1
    assert capsys.readouterr().err == (
        "cannot write to the standard output: no space left on device\n"
    )


@each_command
def test_closed_output_exits_1(argv, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert main.main(argv) == 1
    assert capsys.readouterr().err == (
        "cannot write to the standard output: bad file descriptor\n"
    )


@each_command
def test_output_that_nobody_reads_exits_0(argv, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main.main(argv) == 0
    assert capsys.readouterr().err == ""


@each_command
def test_ascii_output_is_written(argv, monkeypatch, capsys):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    try:
        assert main.main(argv) == 0
    except SystemExit as done:
        assert not done.code  # noqa: PT017 - argparse exits after its help
    assert len(raw.getvalue()) > 8
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("argv", [["--bogus"], ["schema", "bogus"], ["train", "x"]])
def test_lost_errors_keep_the_exit_code(argv, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    try:
        code = main.main(argv)
    except SystemExit as usage:
        code = usage.code
    assert code == 2
