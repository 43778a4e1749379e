"""The built-in text: what is in it, what is not, and how it is split."""

import ast

import pytest
from lmx.data import builtin
from lmx.errors import UserError


@pytest.fixture(scope="module")
def splits():
    return {split: builtin.read("stdlib", split) for split in builtin.SPLITS}


def test_the_standard_library_is_here_sorted_and_is_python(splits):
    wheres = [where for where, _ in splits["train"]]
    assert wheres == sorted(wheres)
    assert len(wheres) > 200
    everything = dict(splits["train"] + splits["valid"])
    assert {"argparse.py", "json/decoder.py", "shutil.py"} <= everything.keys()
    assert ast.get_docstring(ast.parse(everything["shutil.py"]))


def test_tests_foreign_code_and_tables_are_left_out(splits):
    wheres = [where for where, _ in splits["train"] + splits["valid"]]
    folders = {part for where in wheres for part in where.split("/")[:-1]}
    assert not folders & builtin.SKIPPED_FOLDERS
    assert not {"encodings/cp437.py", "html/entities.py", "stringprep.py"} & set(wheres)
    assert "encodings/utf_8.py" in wheres


def test_a_document_is_in_one_split_by_its_path_alone(splits):
    train, valid = ({where for where, _ in splits[s]} for s in builtin.SPLITS)
    assert not train & valid
    assert 0.01 < len(valid) / len(train) < 0.1
    assert splits["valid"] == builtin.read("stdlib", "valid")


@pytest.mark.parametrize(
    ("text", "teaches"),
    [
        ("def f(x):\n    return x\n", True),
        ("", False),
        ("table = (\n    'a'  # 0x61\n    'b'  # 0x62\n    0x63: 'c',\n)\n", False),
        ('"""A docstring.\n\nIt says why.\n"""\nfrom a import b\n', True),
        ("x = 1\n" * builtin.MAX_CHARACTERS, False),
    ],
)
def test_prose_is_told_from_tables(text, teaches):
    assert builtin.is_prose(text) is teaches


def test_an_unknown_corpus_names_what_exists():
    with pytest.raises(UserError, match="no built-in dataset 'wiki'") as fault:
        builtin.read("wiki", "train")
    assert "stdlib" in fault.value.hint


def test_a_python_without_sources_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(
        builtin.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)}
    )
    with pytest.raises(UserError, match="empty on this machine"):
        builtin.read("stdlib", "train")
