"""TODO."""

import json
from pathlib import Path

from ..errors import UserError


def end_tokens(path: Path) -> list[int]:
    """Every token that config.json or generation_config.json says ends a text.

    Raises:
        UserError: one of them cannot be read.
    """
    ends = []
    for name in ("config.json", "generation_config.json"):
        if (path / name).is_file():
            value = read_json(path / name).get("eos_token_id")
            ends += value if isinstance(value, list) else [value]
    return [end for end in dict.fromkeys(ends) if end is not None]


def read_json(file: Path) -> dict:
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise UserError(f"this is not JSON: {error}", place=str(file)) from error
    return value if isinstance(value, dict) else {}
