"""What is not a regular file is refused at once, wherever lmx reads a file."""

import gzip
import json
import os
import socket

import pytest
from lmx.cli import main
from lmx.config.loader import load_recipe
from lmx.config.text_files import read_text
from lmx.data import dataset, readers
from lmx.errors import UserError
from lmx.files.json_files import read_json

ROW = json.dumps({"text": "x"}) + "\n"


def make_pipe(path):
    os.mkfifo(path)


def make_socket(path):
    # A socket's path has at most 108 bytes.
    folder = os.open(path.parent, os.O_RDONLY)
    here = os.open(".", os.O_RDONLY)
    os.fchdir(folder)
    socket.socket(socket.AF_UNIX).bind(path.name)
    os.fchdir(here)
    os.close(folder)
    os.close(here)


def make_endless_links(path):
    path.symlink_to(path.with_name("other"))
    path.with_name("other").symlink_to(path)


KINDS = {
    "pipe": (make_pipe, "a named pipe, not a file"),
    "socket": (make_socket, "a socket, not a file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a device, not a file"),
    "folder": (lambda path: path.mkdir(), "a folder, not a file"),
    "endless_links": (make_endless_links, "symbolic links"),
    "dangling": (lambda path: path.symlink_to("nowhere"), "no such file"),
}


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [
        *((kind, ".jsonl") for kind in KINDS),
        *(("pipe", suffix) for suffix in readers.SUFFIXES if suffix != ".jsonl"),
    ],
)
def test_data_file_of_another_kind_is_refused(tmp_path, kind, suffix):
    make, message = KINDS[kind]
    path = tmp_path / f"train{suffix}"
    make(path)
    if kind == "folder":
        message = "no file of the split"
    with pytest.raises(UserError, match=message):
        dataset.RecordReader(str(path))
    if kind not in ("endless_links", "dangling"):
        with pytest.raises(UserError, match=message):
            dataset.source_size(str(path), "train")
    if kind != "folder":
        with pytest.raises(UserError, match=message):
            dataset.RecordReader(str(tmp_path))


@pytest.mark.parametrize("kind", KINDS)
def test_recipe_and_texts_of_another_kind_are_refused(tmp_path, kind, capsys):
    make, message = KINDS[kind]
    path = tmp_path / "recipe.yaml"
    make(path)
    for read in (load_recipe, lambda path: read_text(path, "corpus", max_bytes=9)):
        with pytest.raises(UserError, match=message):
            read(path)
    if kind in ("pipe", "socket", "device"):
        with pytest.raises(UserError, match=message):
            read_json(path)
    assert main.train([str(path), "--dry-run"]) == 2
    if kind in ("pipe", "socket", "device"):
        assert message in capsys.readouterr().err


def test_text_has_a_limit(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x" * 10)
    assert read_text(path, "prompt", max_bytes=10) == "x" * 10
    with pytest.raises(UserError, match="a prompt has at most 9 bytes"):
        read_text(path, "prompt", max_bytes=9)


@pytest.mark.parametrize("suffix", readers.SUFFIXES)
def test_compressed_bombs_are_refused(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(readers, "SMALL", 1 << 20)
    path = tmp_path / f"a{suffix}.gz"
    path.write_bytes(gzip.compress(b" " * (8 << 20), 9))
    assert path.stat().st_size < 10_000
    with pytest.raises(UserError, match="holds more than 200 times its size"):
        dataset.RecordReader(str(path))


def test_compressed_rows_are_no_bomb(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "SMALL", 1 << 10)
    path = tmp_path / "a.jsonl.gz"
    rows = "".join(json.dumps({"text": f"{n} " * 9}) + "\n" for n in range(9_000))
    path.write_bytes(gzip.compress(rows.encode()))
    assert len(list(dataset.RecordReader(str(path)))) == 9_000


def test_parquet_bomb_is_refused(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr(readers, "SMALL", 1 << 20)
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": ["x" * (16 << 20)]})
    parquet.write_table(table, path, compression="zstd", use_dictionary=False)
    with pytest.raises(UserError, match="holds more than 200 times its size"):
        dataset.RecordReader(str(path))


@pytest.mark.parametrize(
    ("name", "limit", "message"),
    [
        ("a.jsonl", "MAX_LINE", r"a\.jsonl:2: line 2 has more than 99 characters"),
        ("a.txt", "MAX_LINE", r"a\.txt:2: line 2 has more than 99 characters"),
        ("a.txt", "MAX_WHOLE", "a document has at most 99 characters"),
        ("a.json", "MAX_WHOLE", "a .json file has at most 99 characters"),
    ],
)
def test_lines_and_documents_have_limits(tmp_path, monkeypatch, name, limit, message):
    path = tmp_path / name
    path.write_text(ROW + ROW.replace("x", "x" * 100))
    assert readers.suffix(path) == ".json" or list(readers.read_records(path))
    monkeypatch.setattr(readers, limit, 99)
    with pytest.raises(UserError, match=message):
        list(readers.read_records(path))


@pytest.mark.parametrize("name", ["a.zip", "a.jsonl.bz2", "a.jsonl.zip", "a.jsonl.xz"])
def test_other_archives_are_refused_by_name(tmp_path, name):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match="files are not supported"):
        dataset.RecordReader(str(tmp_path / name))
