"""What tests of data share."""

import json

import pytest


@pytest.fixture
def write(tmp_path):
    """Writes rows, or a text, to a file; gives its path."""

    def write(rows, name="rows.jsonl"):
        text = rows if isinstance(rows, str) else "\n".join(map(json.dumps, rows))
        path = tmp_path / name
        path.write_text(text, encoding="utf-8", newline="")
        return str(path)

    return write
