"""The values of a recipe, each by one dotted key."""

import json
from typing import Any

# Keys that say where results go, and are no part of what is tried.
BESIDE = ("output", "tracker")


def recipe_values(data: dict) -> dict[str, Any]:
    """All values of a resolved recipe that say what is tried."""
    return flat({key: value for key, value in data.items() if key not in BESIDE})


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """Values by dotted key, lists of blocks counted from 1, empty blocks kept."""
    if isinstance(value, dict) and value:
        inner = value.items()
    elif isinstance(value, list) and any(isinstance(v, dict | list) for v in value):
        inner = enumerate(value, 1)
    else:
        return {key: value}
    found: dict[str, Any] = {}
    for name, part in inner:
        found |= flat(part, f"{key}.{name}" if key else str(name))
    return found


def one_line(value: Any) -> str:
    """A value as JSON."""
    return json.dumps(value, ensure_ascii=False)
