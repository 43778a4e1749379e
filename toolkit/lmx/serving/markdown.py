"""The Markdown of an answer as elements for the server's page, which makes no HTML."""

from collections.abc import Iterator
from functools import cache
from typing import TypeAlias

from markdown_it import MarkdownIt
from markdown_it.token import Token

MAX_CHARACTERS = 50_000
"""Of a text; some 0.1 s, 2 s of the worst text, in which others wait for Python."""
MAX_DEPTH = 50
"""Elements in one another; deeper ones are left out, their content stays."""
LINKS = ("http://", "https://", "mailto:")

Node: TypeAlias = str | list
"""Text, or an element: its tag, its attributes and its nodes."""


def markdown_nodes(text: str) -> list[Node]:
    """The nodes of a text in CommonMark with tables and strikethrough.

    HTML in it stays text, and so do images, and links that do not lead to the web.
    """
    root: list[Node] = []
    open_nodes = [root]
    for token in _tokens(_parser().parse(text)):
        parent = open_nodes[-1]
        if token.nesting == -1:
            open_nodes.pop()
        elif token.nesting == 1:
            is_kept = not token.hidden and len(open_nodes) <= MAX_DEPTH
            open_nodes.append(_element(token) if is_kept else parent)
            if is_kept:
                parent.append(open_nodes[-1])
        elif token.type in ("fence", "code_block"):
            parent.append(["pre", {"lang": token.info.split(" ")[0]}, token.content])
        elif token.type == "softbreak":
            parent.append("\n")
        elif token.tag:
            parent.append([*_element(token), token.content])
        elif token.content:
            parent.append(token.content)
    return root


@cache
def _parser() -> MarkdownIt:
    parser = MarkdownIt("js-default", {"html": False}).disable("image")
    parser.validateLink = lambda url: url.lower().startswith(LINKS)
    return parser


def _tokens(tokens: list[Token]) -> Iterator[Token]:
    """Tokens of blocks, and in place of each "inline" one those of its text."""
    for token in tokens:
        if token.type == "inline":
            yield from token.children or ()
        else:
            yield token


def _element(token: Token) -> list[Node]:
    names = ("href", "start", "style")  # a table's style is its text-align
    return [token.tag, {n: v for n, v in token.attrs.items() if n in names}]
