"""The standard streams: all text that lmx prints passes through this module.

Text of models, datasets and recipes may hold sequences that move the cursor, change the
title or fill the clipboard. `printable` removes them. A stream that is closed or full
ends a command whose purpose is its output, and never a run.
"""

import errno
import io
import json
import os
import re
import sys
import traceback
from typing import Any, TextIO

from ..errors import FAILED, UserError

# Sequences of ECMA-48 in their 7-bit and 8-bit forms: a control sequence (color,
# cursor), a control string (title, clipboard) and a short escape. Lengths are limited,
# so that a stream holds little text back.
_PARAMETERS = r"(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,8}"
_STRING = r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x00-\x1f\x7f-\x9f]{0,256}"
_SHORT = r"\x1b[ -/]{0,4}"
_SEQUENCE = re.compile(
    rf"{_PARAMETERS}[@-~]|{_STRING}(?:[\x07\x9c]|\x1b\\)|{_SHORT}[0-~]"
)
# The same, without an end.
_UNFINISHED = re.compile(rf"(?:{_PARAMETERS}|{_STRING}\x1b?|{_SHORT})\Z")
# Control characters except tab and newline, and what reorders the text beside it.
_CONTROLS = [*range(9), *range(0x0B, 0x20), *range(0x7F, 0xA0)]
_BIDI = [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_SEPARATORS = [0x2028, 0x2029]
_TABLE = dict.fromkeys(_CONTROLS + _BIDI) | dict.fromkeys(_SEPARATORS, "\n")
_VISIBLE = {code: f"\\u{code:04x}" for code in _CONTROLS + _BIDI}
# In a JSON text these stand only inside strings, where an escape means the same. Half a
# surrogate pair cannot be encoded.
_NOT_IN_JSON = re.compile(
    f"[{''.join(map(chr, _CONTROLS[9:] + _BIDI + _SEPARATORS))}\ud800-\udfff]"
)


class ReaderGone(Exception):
    """Nobody reads the standard output any more, as in `| head`."""


def printable(text: str) -> str:
    """The text without anything that could control a terminal or reorder the line.

    Tabs, newlines and all other Unicode stay. A line or paragraph separator becomes a
    newline.
    """
    return _SEQUENCE.sub("", text).translate(_TABLE)


def visible(text: str) -> str:
    """The text with escapes, such as \\u001b, in place of what `printable` removes."""
    return text.translate(_VISIBLE)


def write_out(text: str, *, tolerant: bool = False) -> None:
    """Write printable text to the standard output at once.

    Args:
        tolerant: go on if the output is lost.

    Raises:
        ReaderGone: nobody reads the output.
        UserError: the output is closed or full.
    """
    error = _send(sys.stdout, printable(text))
    if error is None or tolerant:
        return
    if error.errno == errno.EPIPE:
        raise ReaderGone from error
    reason = (error.strerror or str(error)).lower()
    raise UserError(f"cannot write to the standard output: {reason}", code=FAILED)


def write_err(text: str) -> None:
    """Write printable text to the standard error; nothing happens if it is lost."""
    _send(sys.stderr, printable(text))


def json_text(record: Any, *, indent: int | None = None) -> str:
    """JSON where what `printable` removes, or breaks a line, is an escape."""
    text = json.dumps(record, ensure_ascii=False, indent=indent)
    return _NOT_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def write_json(record: Any, *, indent: int | None = None) -> None:
    """Write a JSON value and a newline to the standard output.

    A JSON reader gets every character, and the terminal only printable ones.

    Raises:
        ReaderGone, UserError: see `write_out`.
    """
    text = json_text(record, indent=indent)
    if not _can_encode(sys.stdout, text):
        text = json.dumps(record, indent=indent)
    write_out(f"{text}\n")


def write_crash(kind: type[BaseException], error: BaseException, trace) -> None:
    """Print a traceback; for `sys.excepthook`."""
    write_err("".join(traceback.format_exception(kind, error, trace)))


class StreamedText:
    """Text that arrives in pieces; a sequence may begin in one and end in another.

    All pieces together print what `printable` makes of the whole text.
    """

    def __init__(self):
        self._held = ""

    def write(self, piece: str) -> None:
        """Write to the standard output all but the beginning of a sequence."""
        text = self._held + piece
        unfinished = _UNFINISHED.search(text)
        end = unfinished.start() if unfinished else len(text)
        self._held = text[end:]
        if end:
            write_out(text[:end])

    def finish(self) -> None:
        """Write the rest; the next piece begins another text."""
        rest, self._held = self._held, ""
        write_out(rest)


class StyledOutput(io.TextIOBase):
    """The standard output for a library that adds styles to printable text."""

    def __init__(self):
        self._stream = sys.stdout

    @property
    def encoding(self) -> str:
        """The encoding of the standard output."""
        return _encoding(self._stream)

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return _isatty(self._stream)

    def write(self, text: str) -> int:
        """Write as it is; nothing happens if the output is lost."""
        _send(self._stream, text)
        return len(text)


def output_is_terminal() -> bool:
    """Whether the standard output is a terminal."""
    return _isatty(sys.stdout)


def reserve_streams() -> None:
    """Open closed standard streams as the null device.

    The next file would otherwise get the number of a standard stream, and what a
    library prints would end in that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _isatty(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


def _encoding(stream: TextIO | None) -> str:
    return getattr(stream, "encoding", None) or "utf-8"


def _can_encode(stream: TextIO | None, text: str) -> bool:
    try:
        text.encode(_encoding(stream))
    except UnicodeEncodeError:
        return False
    return True


def _send(stream: TextIO | None, text: str) -> OSError | None:
    """Write at once; returns the error of a stream that is lost from now on."""
    # Python has no stream where the process was started without one.
    if stream is None or stream.closed:
        return OSError(errno.EBADF, os.strerror(errno.EBADF))
    if not _can_encode(stream, text):
        encoding = _encoding(stream)
        text = text.encode(encoding, "backslashreplace").decode(encoding)
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        _discard(stream)
        return error
    return None


def _discard(stream: TextIO) -> None:
    """Send what is written to a lost stream nowhere, also the rest of its buffer."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
