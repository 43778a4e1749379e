"""The part of an answer that exact match compares."""

import re
from decimal import Decimal

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


# By `exact_match_filter`: the part of an answer that is compared; None = no such part.
FILTERS = {"none": str.strip, "flexible-extract": last_number}
