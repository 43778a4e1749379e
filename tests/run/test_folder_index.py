"""An index of a folder notices every change of the folder, and another key."""

import json
import shutil

import pytest
from folder_damages import DAMAGES
from lmx.files.hashes import INDEX, key_of, read_index, write_index


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "parts" / "0"
    folder.mkdir(parents=True)
    for name in ("first", "second"):
        (folder / name).write_bytes(name.encode() * 10)
    write_index(folder, "a", {"mean": 0.1})
    assert read_index(folder, "a") == {"mean": 0.1}
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folder_has_no_facts(folder, damage):
    DAMAGES[damage](folder)
    assert read_index(folder, "a") is None


def test_folder_of_another_key_has_no_facts(folder, tmp_path):
    assert read_index(folder, "b") is None
    assert read_index(tmp_path / "none", "a") is None


@pytest.mark.parametrize("change", ["key", "facts", "files", "more"])
def test_changed_index_has_no_facts(folder, change):
    content = json.loads((folder / INDEX).read_text())
    changed = {"key": "b", "facts": {"mean": 0.2}, "files": {}, "more": 1}
    (folder / INDEX).write_text(json.dumps(content | {change: changed[change]}))
    assert read_index(folder, "a") is None
    assert read_index(folder, "b") is None


@pytest.mark.parametrize("value", [None, 3, "text", [], {}, [[]], {"sha256": 3}])
def test_other_json_has_no_facts(folder, value):
    (folder / INDEX).write_text(json.dumps(value))
    assert read_index(folder, "a") is None


def test_index_of_other_json_with_a_right_hash_has_no_facts(folder):
    content = {"anything": 3}
    (folder / INDEX).write_text(json.dumps(content | {"sha256": key_of(content)}))
    assert read_index(folder, "a") is None


def test_new_file_has_no_facts(folder):
    (folder / "third").write_text("new")
    assert read_index(folder, "a") is None


def test_used_up_files_may_be_deleted_or_changed(folder):
    def is_second(name):
        return name == "second"

    (folder / "second").write_text("changed")
    assert read_index(folder, "a", is_deleted=is_second) == {"mean": 0.1}
    (folder / "second").unlink()
    assert read_index(folder, "a", is_deleted=is_second) == {"mean": 0.1}
    (folder / "first").unlink()
    assert read_index(folder, "a", is_deleted=is_second) is None


def test_moved_folder_keeps_its_facts(folder, tmp_path):
    shutil.move(folder, tmp_path / "moved")
    assert read_index(tmp_path / "moved", "a") == {"mean": 0.1}
