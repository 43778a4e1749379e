"""Lark grammars of requests: what must be known before llguidance reads them."""

import json
import re

from .json_schema import check_schema, require_short_chain

# Strings, expressions and comments, whose words are no names.
TEXTS = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/')
SCHEMA = re.compile(r"%json\s*(?={)")
DEFINITION = re.compile(r"^[ \t?!]*([A-Za-z_]\w*)[^\n:|]*:", re.MULTILINE)
WHITESPACE = r"[ \t\r\n]{1,20}"
"""Between the tokens of JSON. Small models write spaces forever where they may."""
# Options of llguidance: JSON as it may be, and as json.dumps writes it.
LOOSE = {"whitespace_pattern": WHITESPACE, "lenient": False}
TIGHT = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
NAME = re.compile(r"[A-Za-z_]\w*")


def check_lark(source: str, place: str) -> None:
    """Refuse a grammar with a JSON schema that is refused, or with a long chain of
    rules and terminals. What is no grammar is left to llguidance.

    Raises:
        UserError: with the place.
    """
    decoder, parts, at = json.JSONDecoder(), [], 0
    while match := SCHEMA.search(source, at):
        parts.append(source[at : match.start()])
        at = match.end()
        try:
            schema, at = decoder.raw_decode(source, at)
        except (ValueError, RecursionError):
            continue
        if schema.get("x-guidance") in (LOOSE, TIGHT):
            del schema["x-guidance"]
        check_schema(schema, f"{place}.%json")
    rules = TEXTS.sub(" ", " ".join([*parts, source[at:]]))
    _, *pairs = DEFINITION.split(rules)
    names: dict[str, set[str]] = {}
    for name, body in zip(pairs[::2], pairs[1::2], strict=True):
        names.setdefault(name, set()).update(NAME.findall(body))
    require_short_chain("", names | {"": {*names}}, place)
