"""Hints for the names of other tools, from the table other_names.yaml."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path

from .yaml_io import read

TABLE = Path(__file__).with_name("other_names.yaml")


@cache
def tables() -> dict[str, dict]:
    """The tables of the file, each inverted: lmx's names by another tool's name.

    `keys` and `options` have a list of names; `values` is such a table for each key.
    `advice` has a sentence by name.
    """
    data = read(TABLE.read_text("utf-8")).data
    values = {key: _inverted(names) for key, names in data.pop("values").items()}
    kept = {"values": values, "advice": data.pop("advice")}
    return {name: _inverted(names) for name, names in data.items()} | kept


def _inverted(names: dict[str, str]) -> dict[str, list[str]]:
    own: dict[str, list[str]] = {}
    for name, others in names.items():
        for other in others.split():
            own.setdefault(other, []).append(name)
    return own


def key_hint(key: str, siblings: Iterable[str]) -> str | None:
    """Hint for an unknown key in a block with the keys `siblings`.

    A name with several meanings gets a hint only in a block that has one of them.
    """
    places = [address.rpartition(".") for address in tables()["keys"].get(key, [])]
    if local := [leaf for _, _, leaf in places if leaf in siblings]:
        return f"called '{local[0]}' here"
    if len(places) != 1:
        return None
    [(block, _, leaf)] = places
    return f"called '{leaf}', in {block or 'the top level'}"


def value_hint(path: Iterable, value: object, allowed: Iterable[str]) -> str | None:
    """Hint for an unknown value at `path`, by the last of its keys in the table."""
    values = tables()["values"]
    key = next((step for step in reversed(list(path)) if step in values), None)
    known = values.get(key, {}).get(str(value).lower(), [])
    return next((f"called '{name}' here" for name in known if name in allowed), None)
