"""Text that reaches a terminal or another program through a standard stream."""

import os
import re
from typing import TextIO

# Terminal escape sequences, and control characters except tab and newline.
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """The text without anything that could move the cursor or change the title."""
    return _CONTROL.sub("", text)


def write(stream: TextIO, text: str) -> None:
    """Write to a standard stream; nothing happens if nobody reads it any more."""
    try:
        stream.write(text)
        stream.flush()
    except OSError:  # A closed pipe, or a full disk.
        close(stream)


def close(stream: TextIO) -> None:
    """Send what is written to a lost stream nowhere, also the rest of its buffer."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
