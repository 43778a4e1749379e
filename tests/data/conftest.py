"""Fixtures of the data tests."""

import importlib.util
import json
from pathlib import Path

import pytest
from lmx.data import hub_datasets
from lmx.models.loader import load_tokenizer


@pytest.fixture(scope="session")
def load_script():
    """A function that imports a program of the folder `data`."""

    def load(name):
        path = Path(__file__).parents[2] / "data" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    """A small trained tokenizer, with a chat template."""
    return load_tokenizer(tokenizer_folder)


@pytest.fixture
def write(tmp_path):
    """A function that writes records or a text to a file and returns the path."""

    def write(records, name="rows.jsonl"):
        text = (
            records if isinstance(records, str) else "\n".join(map(json.dumps, records))
        )
        path = tmp_path / name
        path.write_text(text, encoding="utf-8", newline="")
        return str(path)

    return write


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    """A cache folder for a single test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("LMX_CACHE", str(folder))
    return folder


class Streamed:
    """A stream of records. Each iteration starts at the first record."""

    def __init__(self, records):
        self.records = records

    def __iter__(self):
        yield from self.records


@pytest.fixture
def hub(monkeypatch):
    """Replace the Hub client with one small dataset and return its requests."""
    datasets = pytest.importorskip("datasets")
    records = [{"text": f"row {number}"} for number in range(50)]
    requests = []

    class Builder:
        hash, config_id = "abc", "default-1"

        class info:
            splits = {"train": None, "validation": None}  # noqa: RUF012

    def load_builder(source, *, name, revision):
        if source == "someone/configured" and name is None:
            raise ValueError("Config name is missing.\nPlease pick one: ['main']")
        if source == "someone/configured":
            return Builder
        if source != "someone/rows":
            raise FileNotFoundError(f"no dataset {source}")
        return Builder

    def load(source, *, name, split, streaming, revision):
        options = {"name": name, "revision": revision}
        given = [value for value in options.values() if value]
        requests.append((split, streaming, *given))
        return Streamed(records) if streaming else records

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_datasets, "_online", lambda endpoint: True)
    monkeypatch.setattr(datasets, "load_dataset_builder", load_builder)
    monkeypatch.setattr(datasets, "load_dataset", load)
    return requests
