"""Commands whose output is lost: a message, the right exit code and no traceback."""

import io
import os
import sys

import pytest
from lmx.cli import main

each_command = pytest.mark.parametrize(
    "argv", [["--help"], ["schema"], ["schema", "--json"], ["train", "--list"]]
)


@each_command
@pytest.mark.parametrize(
    ("lost", "code", "reason"),
    [
        ("full", 1, "no space left on device"),
        ("closed", 1, "bad file descriptor"),
        # As in `| head`.
        ("unread", 0, ""),
    ],
)
def test_lost_output_has_an_exit_code(argv, lost, code, reason, monkeypatch, capsys):
    if lost == "full" and not os.path.exists("/dev/full"):
        pytest.skip("Linux only")
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full" if lost == "full" else writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", None if lost == "closed" else stream)
        assert main.main(argv) == code
    message = f"cannot write to the standard output: {reason}\n" if reason else ""
    assert capsys.readouterr().err == message


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
