"""The built-in dataset: its files, the excluded files and its splits."""

import ast

import pytest
from lmx.data import builtin
from lmx.errors import UserError


@pytest.fixture(scope="module")
def splits():
    return {split: builtin.read("stdlib", split) for split in builtin.SPLITS}


def test_stdlib_is_sorted_python_source(splits):
    paths = [path for path, _ in splits["train"]]
    assert paths == sorted(paths)
    assert len(paths) > 200
    texts_by_path = dict(splits["train"] + splits["valid"])
    assert {"argparse.py", "json/decoder.py", "shutil.py"} <= texts_by_path.keys()
    assert ast.get_docstring(ast.parse(texts_by_path["shutil.py"]))


def test_tests_third_party_code_and_tables_are_excluded(splits):
    paths = [path for path, _ in splits["train"] + splits["valid"]]
    folders = {part for path in paths for part in path.split("/")[:-1]}
    assert not folders & builtin.SKIPPED_FOLDERS
    assert not {"encodings/cp437.py", "html/entities.py", "stringprep.py"} & set(paths)
    assert "encodings/utf_8.py" in paths


def test_path_decides_the_split(splits):
    train, valid = ({path for path, _ in splits[s]} for s in builtin.SPLITS)
    assert not train & valid
    assert 0.01 < len(valid) / len(train) < 0.1
    assert splits["valid"] == builtin.read("stdlib", "valid")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(x):\n    return x\n", True),
        ("", False),
        ("table = (\n    'a'  # 0x61\n    'b'  # 0x62\n    0x63: 'c',\n)\n", False),
        ('"""A docstring.\n\nIt has a reason.\n"""\nfrom a import b\n', True),
        ("x = 1\n" * builtin.MAX_CHARACTERS, False),
    ],
)
def test_is_prose_rejects_tables(text, expected):
    assert builtin.is_prose(text) is expected


def test_unknown_dataset_lists_the_builtin_ones():
    with pytest.raises(UserError, match="no built-in dataset 'wiki'") as error:
        builtin.read("wiki", "train")
    assert "stdlib" in error.value.hint


def test_python_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(
        builtin.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)}
    )
    with pytest.raises(UserError, match="empty on this machine"):
        builtin.read("stdlib", "train")
