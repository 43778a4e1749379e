"""JSON and text files of users, which may be damaged or too large."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..config.text_files import require_regular
from ..errors import UserError
from .atomic import write_atomic

# The largest published tokenizer.json has 35 MB.
MAX_JSON_BYTES = 256 << 20


def parse_json(text: str | bytes, place: Path | str) -> Any:
    """The value of a JSON text.

    Args:
        place: the file, or file and line, that an error names.

    Raises:
        UserError: the text is not JSON.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise UserError("not JSON: nested too deeply", place=str(place)) from error
    except ValueError as error:
        raise UserError(f"not JSON: {error}", place=str(place)) from error


def read_json(path: Path) -> dict:
    """The object in a JSON file; empty if the file holds another value.

    Raises:
        FileNotFoundError: there is nothing.
        UserError: it is no file, or not JSON.
    """
    require_regular(path, max_bytes=MAX_JSON_BYTES)
    value = parse_json(path.read_bytes(), path)
    return value if isinstance(value, dict) else {}


def object_in(path: Path) -> dict:
    """The object in a JSON file; empty if there is none, or if it is damaged."""
    try:
        return read_json(path) if path.is_file() else {}
    except (OSError, UserError):
        return {}


def read_text(path: Path) -> str:
    """The text of a file, with marks in place of bytes that are not UTF-8.

    Empty if there is no such file.
    """
    return path.read_text("utf-8", errors="replace") if path.is_file() else ""


def read_jsonl(path: Path, **types: type) -> list[dict]:
    """The records of a JSON Lines file; empty if there is no such file.

    Args:
        types: keys of a record, and the type of their values. Other lines are skipped:
            the last line of a killed run may be incomplete.
    """
    return [record for _, record in _records(path, types)]


def filter_jsonl(path: Path, keeps: Callable[[dict], bool]) -> None:
    """Delete the lines that are no record of a stage, or that `keeps` does not keep.

    Raises:
        UserError: a disk error; the file stays as it was.
    """
    lines = (line for line, r in _records(path, {"stage": str}) if keeps(r))
    write_atomic(path, "".join(f"{line}\n" for line in lines))


def _records(path: Path, types: dict[str, type]) -> Iterator[tuple[str, dict]]:
    # Other line breaks, such as U+2028, are part of a text.
    for line in read_text(path).split("\n"):
        with suppress(UserError):
            record = parse_json(line, path)
            if isinstance(record, dict) and all(
                isinstance(record.get(key), kind) for key, kind in types.items()
            ):
                yield line, record
