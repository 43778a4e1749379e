"""YAML without surprising scalars, with the position of every key and value."""

import math
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import yaml

from ..errors import MAX_VALUE, shorten
from .errors import KeyPath, Problem, SourcePosition

TAG = "tag:yaml.org,2002:"
# More than any recipe needs. An alias counts as all that it stands for.
MAX_VALUES, MAX_DEPTH = 100_000, 50
# MLX counts in 32 bits, and no quantity of a recipe is larger.
MAX_NUMBER = 2**32 - 1
TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"
TOO_LARGE = f"the recipe has more than {MAX_VALUES:,} values"
# PyYAML takes the first match in this order.
SCALARS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(0|[1-9][0-9_]*)",
    "float": r"[-+]?(\.[0-9]+|(0|[1-9][0-9_]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
PARSERS = {
    "str": str,
    "null": lambda text: None,
    "bool": lambda text: {"true": True, "false": False}.get(text.lower(), text),
    "int": int,
    "float": lambda text: float(re.sub(r"\.(?=inf|nan)", "", text.lower())),
}
# Words that YAML 1.1 reads as booleans. Here they are text, except where the schema has
# a boolean.
SWITCHES = {"yes": True, "on": True, "no": False, "off": False}
MESSAGES = {
    TOO_DEEP: TOO_DEEP,
    TOO_LARGE: TOO_LARGE,
    r"character '\t'": "a tab: YAML is indented with spaces",
    "expected <block end>": "the indentation does not match the lines above",
    "could not find expected ':'": "expected the form `key: value`",
    "mapping values are not allowed": (
        "a second ':' where text was expected: quote the text, or fix the indentation"
    ),
    "another document": "a recipe is one document: remove `---`",
    "unexpected end of stream": "this quote is not closed",
    "expected ',' or": "this bracket is not closed, or a comma is missing in it",
    "but found '<stream end>'": "this bracket is not closed",
}
UNCLOSED = re.compile("end of stream|stream end|expected ',' or")


class _Loader(yaml.SafeLoader):
    """SafeLoader without the implicit types of YAML 1.1: SCALARS has all types."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 - declared by PyYAML

    def fetch_flow_collection_start(self, token_class: type) -> None:
        # PyYAML's time grows with the square of the depth.
        if self.flow_level >= MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=TOO_DEEP, problem_mark=self.get_mark())
        super().fetch_flow_collection_start(token_class)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes text which YAML 1.1 or `read` takes for another type."""


for _name, _pattern in SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(TAG + _name, re.compile(f"^(?:{_pattern})$"), None)


@dataclass
class Document:
    """Data read from YAML.

    Attributes:
        data: dicts with text keys, lists and scalars; None in place of invalid values.
        keys: position of every key, by the path of its value.
        values: position of every value, by its path.
        errors: syntax errors, duplicate keys and tags that are not data.
        invalid: paths of values with an error.
    """

    data: Any = None
    keys: dict[KeyPath, SourcePosition] = field(default_factory=dict)
    values: dict[KeyPath, SourcePosition] = field(default_factory=dict)
    errors: list[Problem] = field(default_factory=list)
    invalid: list[KeyPath] = field(default_factory=list)

    def _build(
        self, node: yaml.Node, path: KeyPath, above: tuple[int, ...] = ()
    ) -> Any:
        self.values[path] = _position(node.start_mark)
        if len(self.values) > MAX_VALUES:
            raise yaml.MarkedYAMLError(problem=TOO_LARGE, problem_mark=node.start_mark)
        if id(node) in above:
            return self._refuse(node, "an alias cannot contain itself", path)
        if len(above) >= MAX_DEPTH:
            return self._refuse(node, TOO_DEEP, path)
        above = (*above, id(node))
        kind = node.tag.removeprefix(TAG)
        if kind == "map" and isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, above)
        if kind == "seq" and isinstance(node, yaml.SequenceNode):
            items = enumerate(node.value)
            return [self._build(item, (*path, i), above) for i, item in items]
        if kind not in PARSERS or not isinstance(node, yaml.ScalarNode):
            tag = node.tag.replace(TAG, "!!")
            return self._refuse(node, f"the tag {tag} is not plain data", path)
        if fault := text_fault(node.value):
            return self._refuse(node, fault, path)
        try:
            value = PARSERS[kind](node.value)
        except ValueError:
            fault = f"{shorten(node.value, MAX_VALUE)!r} does not match its tag"
            return self._refuse(node, fault, path)
        if kind in ("int", "float") and MAX_NUMBER < abs(value) < math.inf:
            fault = f"a number is at most {MAX_NUMBER:,}"
            return self._refuse(node, fault, path)
        return value

    def _mapping(self, node: yaml.MappingNode, path: KeyPath, above: tuple) -> dict:
        built: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._refuse(key, "a key must be text, not a list or a block")
            elif fault := text_fault(key.value):
                self._refuse(key, fault)
            elif key.value in built:
                line, column = self.keys[(*path, key.value)]
                fault = f"duplicate key '{key.value}', already given at {line}:{column}"
                self._refuse(key, fault)
            else:
                inner = (*path, key.value)
                self.keys[inner] = _position(key.start_mark)
                built[key.value] = self._build(value, inner, above)
        return built

    def _refuse(self, node: yaml.Node, fault: str, path: KeyPath | None = None) -> None:
        """Add an error about the value at `path`; None = about a key."""
        self.invalid += [] if path is None else [path]
        self.errors.append(Problem(path or (), fault, place=_position(node.start_mark)))


def read(text: str) -> Document:
    """Read one YAML document; errors are collected in it, not raised."""
    document = Document()
    try:
        node = yaml.compose(text, Loader=_Loader)
        document.data = node and document._build(node, ())
    except yaml.MarkedYAMLError as error:
        problem = str(error.problem)
        messages = (text for part, text in MESSAGES.items() if part in problem)
        # An unclosed quote or bracket: report where it was opened.
        opened = error.context_mark if UNCLOSED.search(problem) else None
        place = _position(opened or error.problem_mark or error.context_mark)
        message = next(messages, f"not YAML: {problem}")
        document.errors.append(Problem((), message, place=place))
    except yaml.reader.ReaderError as error:
        *above, line = text[: error.position].split("\n")
        place = SourcePosition(len(above) + 1, len(line) + 1)
        message = "a control character is not allowed"
        document.errors.append(Problem((), message, place=place))
    except RecursionError:
        document.errors.append(Problem((), TOO_DEEP))
    return document


@lru_cache(maxsize=8)
def read_shared(text: str) -> Document:
    """Read a document that all calls with its text share: do not change it."""
    return read(text)


def write(data: Any) -> str:
    """YAML text that `read` and other YAML readers parse to the same data."""
    return yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=88
    )


def write_inline(data: Any) -> str:
    """YAML text on one line, which may stand for a value inside other YAML."""
    style = {"default_flow_style": True, "allow_unicode": True, "sort_keys": False}
    # In a list, text is quoted as YAML with brackets needs it.
    inline = yaml.dump([data], Dumper=_Dumper, width=float("inf"), **style)
    return inline.strip()[1:-1]


def text_fault(text: str) -> str | None:
    """Why a scalar is not text that a file can hold."""
    if "\0" in text:
        return "a NUL character is not allowed"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair is not allowed"
    return None


def _position(mark: yaml.Mark) -> SourcePosition:
    return SourcePosition(mark.line + 1, mark.column + 1)
