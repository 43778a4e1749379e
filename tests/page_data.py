"""What a page of lmx shows: its data, and what its script draws of them."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="there is no Node.js")


def data_of(html: str) -> dict:
    """Title, header and sections."""
    pattern = r'<script type="application/json" id="data">(.*?)</script>'
    [text] = re.findall(pattern, html, re.DOTALL)
    return json.loads(text)


def sections(html: str) -> dict[str, list[dict]]:
    """The blocks of each section by its id."""
    return {section["id"]: section["blocks"] for section in data_of(html)["sections"]}


def blocks(html: str) -> list[dict]:
    """All blocks."""
    return sum(sections(html).values(), data_of(html)["header"])


def charts(html: str) -> list[dict]:
    """All charts."""
    return [block for block in blocks(html) if "lines" in block]


def rows(html: str) -> list[list[str]]:
    """The cells of all tables as text, with those of charts."""
    return [
        [cell["text"] if isinstance(cell, dict) else cell for cell in row]
        for block in blocks(html)
        for row in block.get("table", block).get("rows", [])
    ]


def drawn(html: str, folder: Path) -> str:
    """The page after its script has run, on a small DOM in Node.js."""
    page = folder / "drawn.html"
    page.write_text(html)
    command = [NODE, Path(__file__).with_name("small_dom.js"), page]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
