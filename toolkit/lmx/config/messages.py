"""Messages for pydantic errors, with hints."""

import difflib
import re
from collections.abc import Iterable
from typing import Any

from .errors import KeyPath, Problem
from .json_schema import section_at, sections
from .key_hints import key_hint, value_hint
from .validation import describe, path_of, shown


def explain(error: dict, data: Any) -> Problem:
    """The problem behind one pydantic error about `data`."""
    kind, context = error["type"], error.get("ctx", {})
    path = path_of(error["loc"], data)
    if kind == "extra_forbidden":
        return _unknown_key(path, data)
    if kind == "missing":
        key = error["loc"][-1]
        hint = section_at(path, data)[1]["properties"][key]["description"]
        return Problem(path, f"missing key '{key}'", hint, of="block")
    if kind == "value_error":
        return Problem(path, str(context["error"]), of="block")
    if kind == "union_tag_not_found":
        return Problem(path, f"missing key {context['discriminator']}", of="block")
    if kind in ("literal_error", "union_tag_invalid"):
        value = error["input"]
        if kind == "union_tag_invalid":
            # A recipe may have the value alone in place of the block.
            path = path_of((*path, context["discriminator"].strip("'")), data)
            value = context["tag"]
        expected = context.get("expected") or context["expected_tags"]
        names = [name.strip("'") for name in re.split(", | or ", expected)]
        hint = value_hint(path, value, names) or nearest(value, names)
        if path[-1] == "method":
            return Problem(path, f"unknown method {shown(value)}", hint)
        choices = "one of " * (len(names) > 1) + ", ".join(names)
        message = f"expected {choices}; got {shown(value)}"
        return Problem(path, message, None if hint.startswith("available") else hint)
    hint, value = None, error["input"]
    if kind == "string_type" and isinstance(value, int | float):
        hint = "use quotes to make it text"
    if isinstance(value, str) and path[:-1] == ("stages",):
        is_kind = value in sections()["stages"][0]["properties"]
        hint = f"write '- {value}:'" if is_kind else None
    return Problem(path, describe(error), hint)


def nearest(name: Any, names: Iterable[str]) -> str | None:
    """The nearest name as a hint, else all names."""
    names = list(names)
    close = difflib.get_close_matches(str(name), names, n=1)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"available: {', '.join(names)}" if names else None


def _unknown_key(path: KeyPath, data: Any) -> Problem:
    address, section = section_at(path[:-1], data)
    key, names = str(path[-1]), [*section["properties"]]
    hint = key_hint(key, names)
    # The block that has this key is named unless this block has a key of a near name.
    if not hint and not difflib.get_close_matches(key, names, n=1):
        homes = [
            home
            for home, blocks in sections().items()
            if any(key in block["properties"] for block in blocks)
        ]
        # lmx itself writes the block `python`.
        homes.sort(key=lambda home: (home == "python", bool(home), home.count(".")))
        # `train` is a stage and a key of data.
        homes = [h or "the top level" for h in homes if h in (homes[0], "stages")]
        hint = f"'{key}' belongs to {' or '.join(homes)}" if homes else None
    word = "stage kind" if address == "stages" else "key"
    message = f"unknown {word} '{key}'"
    return Problem(path, message, hint or nearest(key, names), of="key")
