"""YAML that means what it looks like, with the place of every key and value."""

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from .errors import ConfigError, KeyPath, SourcePosition

TAG = "tag:yaml.org,2002:"
# In this order, as PyYAML takes the first that matches.
PLAIN = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(0|[1-9][0-9_]*)", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|(0|[1-9][0-9_]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}
PROBLEMS = {
    r"character '\t'": "a tab: YAML is indented with spaces",
    "expected <block end>": "the indentation does not fit the lines above",
    "could not find expected ':'": "this is not of the form `key: value`",
    "mapping values are not allowed": (
        "a second ':' where text was expected: quote the text, or mend the indentation"
    ),
    "another document": "a recipe is one document: leave `---` out",
    "unexpected end of stream": "this quote is never closed",
    "expected ',' or": "this bracket is never closed, or a comma is missing in it",
    "but found '<stream end>'": "this bracket is never closed",
}
UNCLOSED = re.compile("end of stream|stream end|expected ',' or")


class _Loader(yaml.SafeLoader):
    """SafeLoader without YAML 1.1's surprises: see PLAIN for all that is not text."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 - PyYAML's own declaration


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes what YAML 1.1 or this module would not read as text."""


for _name, (_pattern, _first) in PLAIN.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            TAG + _name, re.compile(rf"^(?:{_pattern})$"), _first
        )


@dataclass
class Document:
    """Data read from YAML.

    Attributes:
        data: dicts with text keys, lists and scalars; None where the text is faulty.
        keys: place of every key, by the path of its value.
        values: place of every value, by its path.
        faults: syntax errors, duplicate keys, tags that are not data.
        unread: paths of values that a fault stands for.
    """

    data: Any = None
    keys: dict[KeyPath, SourcePosition] = field(default_factory=dict)
    values: dict[KeyPath, SourcePosition] = field(default_factory=dict)
    faults: list[ConfigError] = field(default_factory=list)
    unread: list[KeyPath] = field(default_factory=list)

    def _build(
        self, node: yaml.Node, path: KeyPath, above: tuple[int, ...] = ()
    ) -> Any:
        self.values[path] = _place(node.start_mark)
        if id(node) in above:
            return self._unread(node, path, "an alias cannot hold itself")
        above = (*above, id(node))
        match node.tag.removeprefix(TAG), node:
            case "map", yaml.MappingNode():
                return self._mapping(node, path, above)
            case "seq", yaml.SequenceNode():
                items = enumerate(node.value)
                return [self._build(item, (*path, i), above) for i, item in items]
            case ("str" | "null" | "bool" | "int" | "float") as kind, yaml.ScalarNode():
                return self._scalar(kind, node, path)
        tag = node.tag.replace(TAG, "!!")
        return self._unread(node, path, f"the tag {tag} is no plain data")

    def _mapping(self, node: yaml.MappingNode, path: KeyPath, above: tuple) -> dict:
        built: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._fault(key, "a key is a word, not a list or a block")
            elif key.value in built:
                first = self.keys[(*path, key.value)]
                self._fault(
                    key,
                    f"duplicate key '{key.value}', "
                    f"already given at {first.line}:{first.column}",
                )
            else:
                here = (*path, key.value)
                self.keys[here] = _place(key.start_mark)
                built[key.value] = self._build(value, here, above)
        return built

    def _scalar(self, kind: str, node: yaml.ScalarNode, path: KeyPath) -> Any:
        try:
            return _scalar(kind, node.value)
        except ValueError:
            message = f"{node.value!r} is not of the type its tag says"
            return self._unread(node, path, message)

    def _unread(self, node: yaml.Node, path: KeyPath, message: str) -> None:
        self.unread.append(path)
        self._fault(node, message)

    def _fault(self, node: yaml.Node, message: str) -> None:
        self.faults.append(ConfigError(message, _place(node.start_mark)))


def read(text: str) -> Document:
    """Read one YAML document; its faults are collected, not raised."""
    document = Document()
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        document.faults.append(_syntax(error))
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line = before.count("\n") + 1
        place = SourcePosition(line, error.position - (before.rfind("\n") + 1) + 1)
        document.faults.append(ConfigError("a control character, not text", place))
    else:
        if node is not None:
            document.data = document._build(node, ())
    return document


def write(data: Any) -> str:
    """YAML text that `read` and any other YAML reader take for the same data."""
    return yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=88
    )


def _scalar(kind: str, text: str) -> Any:
    match kind:
        case "null":
            return None
        case "bool":
            return {"true": True, "false": False}.get(text.lower(), text)
        case "int":
            return int(text)
        case "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _place(mark: yaml.Mark) -> SourcePosition:
    return SourcePosition(mark.line + 1, mark.column + 1)


def _syntax(error: yaml.MarkedYAMLError) -> ConfigError:
    problem = str(error.problem)
    # What runs to the end of the file was opened long before it.
    opened = error.context_mark if UNCLOSED.search(problem) else None
    place = _place(opened or error.problem_mark or error.context_mark)
    words = (words for part, words in PROBLEMS.items() if part in problem)
    return ConfigError(next(words, f"not YAML: {problem}"), place)
