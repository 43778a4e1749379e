"""What a page of lmx shows: its data, and what a browser draws of them."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)
NODE = shutil.which("node")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM or NODE), reason="there is neither Chromium nor Node.js"
)


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
    """The page after its script has run, in Chromium or on a small DOM in Node.js."""
    page = folder / "drawn.html"
    page.write_text(html)
    command = [NODE, Path(__file__).with_name("small_dom.js"), page]
    if CHROMIUM:
        command = [CHROMIUM, "--headless", "--disable-gpu", "--dump-dom", page.as_uri()]
        # Chromium's sandbox needs another user than root.
        command += ["--no-sandbox"] * (os.geteuid() == 0)
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60
    ).stdout
