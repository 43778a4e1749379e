"""The part of an answer that exact match compares."""

import json
import re
from decimal import Decimal

from .chat.messages import load_json

# Characters of an answer of one line that is taken to be the only correct one.
SHORT = 64

NUMBER = re.compile(r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")
# Before a number: a sign, as in "-5", "-$5" and "$-5", but not in "9-5".
MINUS = re.compile(r"(?<![\w)])[-\u2212]\$?$")


def last_number(text: str) -> Decimal | None:
    """The last number of an answer; None if it has none.

    GSM8K writes the result after `####`: if a number is there, only that part counts.
    Thousands separators, `$` and a final period are not part of the value.
    """
    result = text.rpartition("####")[2]
    matches = [*NUMBER.finditer(result)] or [*NUMBER.finditer(result := text)]
    if not matches:
        return None
    value = Decimal(matches[-1][0].replace(",", ""))
    return -value if MINUS.search(result[: matches[-1].start()]) else value


def has_one_form(text: str) -> bool:
    """Whether an answer is short or JSON, so that a correct one is equal to it."""
    text = text.strip()
    is_short = 0 < len(text) <= SHORT and len(text.splitlines()) == 1
    return is_short or json_value(text) is not None


def json_value(text: str) -> dict | list | None:
    """The object or list that an answer is; None if it is other text."""
    try:
        value = load_json(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict | list) else None


def canonical(value: object) -> str:
    """JSON text that equal values have in common, of which 1, 1.0 and true are none."""
    return json.dumps(value, sort_keys=True)


def whole(text: str) -> str:
    """An answer without white space around it; that of JSON has one layout."""
    value = json_value(text)
    return text.strip() if value is None else canonical(value)


# By `exact_match.filter`: the part of an answer that is compared; None = no such part.
FILTERS = {"none": whole, "flexible-extract": last_number}
