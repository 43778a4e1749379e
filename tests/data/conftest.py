"""What tests of data share."""

import json

import pytest
from lmx.data import dataset


@pytest.fixture
def write(tmp_path):
    """Writes rows, or a text, to a file; gives its path."""

    def write(rows, name="rows.jsonl"):
        text = rows if isinstance(rows, str) else "\n".join(map(json.dumps, rows))
        path = tmp_path / name
        path.write_text(text, encoding="utf-8", newline="")
        return str(path)

    return write


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    """A cache of one test alone."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("LMX_CACHE", str(folder))
    return folder


class Streamed:
    """Rows that can only be iterated, from the beginning every time."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        yield from self.rows


@pytest.fixture
def hub(monkeypatch):
    """The Hub's client, with one small data set and no network; what it was asked."""
    datasets = pytest.importorskip("datasets")
    rows = [{"text": f"row {number}"} for number in range(50)]
    asked = []

    class Builder:
        hash, config_id = "abc", "default-1"

        class info:
            splits = {"train": None, "validation": None}  # noqa: RUF012

    def builder(source, *, revision):
        if source != "someone/rows":
            raise FileNotFoundError(f"no data set {source}")
        return Builder

    def load(source, *, split, streaming, revision):
        asked.append((split, streaming))
        return Streamed(rows) if streaming else rows

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(dataset, "_online", lambda endpoint: True)
    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked
