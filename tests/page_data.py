"""What a page of lmx shows: its data, and what a browser draws of them."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")


def data_of(html: str) -> dict:
    """Title, header and sections."""
    pattern = r'<script type="application/json" id="data">(.*?)</script>'
    [text] = re.findall(pattern, html, re.DOTALL)
    return json.loads(text)


def sections(html: str) -> list[str]:
    """The ids of the sections."""
    return [section["id"] for section in data_of(html)["sections"]]


def blocks(html: str, kind: str) -> list[dict]:
    """All blocks of a type, also those in others."""

    def within(value):
        if isinstance(value, list):
            for each in value:
                yield from within(each)
        elif isinstance(value, dict):
            if value.get("type") == kind:
                yield value
            yield from within([*value.values()])

    return [*within(data_of(html))]


def rows(html: str) -> list[list[str]]:
    """The cells of all tables as text."""
    return [
        [cell["text"] if isinstance(cell, dict) else cell for cell in row]
        for table in blocks(html, "table")
        for row in table["rows"]
    ]


def drawn(html: str, folder: Path) -> str:
    """The elements that Chromium has after the page's script has run."""
    page = folder / "drawn.html"
    page.write_text(html)
    command = [BROWSER, "--headless", "--disable-gpu", "--dump-dom", page.as_uri()]
    # Chromium's sandbox needs another user than root.
    command += ["--no-sandbox"] * (os.geteuid() == 0)
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60
    ).stdout
