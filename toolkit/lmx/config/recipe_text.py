"""The text of a recipe, changed in place: its comments and layout stay.

The first line of a recipe may name its JSON Schema for editors that use
yaml-language-server (VS Code, Neovim, Helix, Zed and others).
"""

from typing import Any

import yaml

from .errors import KeyPath
from .yaml_io import write_inline

SCHEMA_LINE = "# yaml-language-server: $schema="


def with_schema_line(text: str, schema: str) -> str:
    """The text with the address of its schema, a URL or a relative path.

    A URL has no spaces, at which editors would end the address.
    """
    return f"{SCHEMA_LINE}{schema}\n{without_schema_line(text)}"


def without_schema_line(text: str) -> str:
    """The text without the address of its schema, which may be a private path."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(SCHEMA_LINE))


def summary(text: str) -> str:
    """The first comment of a recipe."""
    lines = without_schema_line(text).splitlines()
    return next((line.lstrip("# ") for line in lines if line.startswith("#")), "")


def set_value(text: str, path: KeyPath, value: Any, key: str | None = None) -> str:
    """The text with another value at a path that has a scalar or a list in brackets.

    Args:
        key: the new name of the key; None = the same.
    """
    name, node = _entry(text, path)
    assert isinstance(node, yaml.ScalarNode) or node.flow_style
    text = _replaced(text, node, write_inline(value))
    return _replaced(text, name, key) if key else text


def without_key(text: str, path: KeyPath) -> str:
    """The text without the line of a key whose value is on the same line."""
    name, node = _entry(text, path)
    assert name.start_mark.line == node.end_mark.line
    lines = text.splitlines(keepends=True)
    del lines[name.start_mark.line]
    return "".join(lines)


def _entry(text: str, path: KeyPath) -> tuple[yaml.Node, yaml.Node]:
    """The key and the value at a path; for an entry of a list, the value twice."""
    key = node = yaml.compose(text, Loader=yaml.SafeLoader)
    for step in path:
        if isinstance(step, int):
            key = node = node.value[step]
        else:
            key, node = next(pair for pair in node.value if pair[0].value == step)
    return key, node


def _replaced(text: str, node: yaml.Node, new: str) -> str:
    return text[: node.start_mark.index] + new + text[node.end_mark.index :]
