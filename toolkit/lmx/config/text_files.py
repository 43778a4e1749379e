"""Opens files that a user names: regular files only, which never block a reader."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from ..errors import UserError

KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a named pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}


def require_regular(
    path: Path, status: os.stat_result | None = None, *, max_bytes: int | None = None
) -> None:
    """Refuse what is not a regular file: a read of it might wait or never end.

    Raises:
        OSError: there is no such file, or links lead in a circle.
        UserError: it is a folder, a pipe, a socket or a device, or has more bytes.
    """
    status = status or path.stat()
    for is_kind, kind in KINDS.items():
        if is_kind(status.st_mode):
            raise UserError(f"this is {kind}, not a file", place=str(path))
    if max_bytes is not None and status.st_size > max_bytes:
        raise UserError(
            f"the file has {status.st_size:,} bytes, and at most {max_bytes:,} are "
            "read: it is damaged, or of another kind",
            place=str(path),
        )


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read its bytes.

    Raises:
        OSError, UserError: see `require_regular`.
    """
    require_regular(path)
    # Without O_NONBLOCK, a pipe that takes the place of the file would block.
    stream = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        require_regular(path, os.fstat(stream.fileno()))
    except UserError:
        stream.close()
        raise
    return stream


def read_text(path: Path, what: str, *, max_bytes: int) -> str:
    """The text of a regular file in UTF-8.

    Args:
        what: what the file is, for messages: recipe, prompt.

    Raises:
        UserError: it cannot be read, is not UTF-8, or has more bytes.
    """
    place = str(path)
    try:
        with open_regular(path) as stream:
            data = stream.read(max_bytes + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"cannot read the {what}: {reason}", place=place) from error
    if len(data) > max_bytes:
        raise UserError(f"a {what} has at most {max_bytes:,} bytes", place=place)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"byte {error.start + 1} is not UTF-8 text"
        raise UserError(message, place=place) from error
