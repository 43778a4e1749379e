"""The runs of a sweep, and the names of their folders."""

import pytest
from lmx.config.grid import expand, folder_name, read_lines
from lmx.errors import UserError


def test_grid_has_every_combination():
    assert expand(["a.b=1e-4,3e-4", "seed=0,1"], []) == [
        {"a.b": "1e-4", "seed": "0"},
        {"a.b": "1e-4", "seed": "1"},
        {"a.b": "3e-4", "seed": "0"},
        {"a.b": "3e-4", "seed": "1"},
    ]


def test_commas_in_brackets_and_quotes_belong_to_a_value():
    [run] = expand(['data.train=[a, "b,c"]'], [])
    assert run == {"data.train": '[a, "b,c"]'}
    values = [run["a"] for run in expand(["a=[1, 2],{x: 1, y: 2},'p,q'"], [])]
    assert values == ["[1, 2]", "{x: 1, y: 2}", "'p,q'"]


def test_lines_run_with_every_combination_and_repetitions_once():
    lines = read_lines("# rates\na=1 b='x y'\n\n a=2\na=2\n")
    assert expand(["seed=0,0,1"], lines) == [
        {"a": "1", "b": "x y", "seed": "0"},
        {"a": "1", "b": "x y", "seed": "1"},
        {"a": "2", "seed": "0"},
        {"a": "2", "seed": "1"},
    ]


@pytest.mark.parametrize("word", ["a", "=1", "output=x", "a=1 a=2"])
def test_wrong_arguments_are_refused(word):
    with pytest.raises(UserError):
        expand(word.split(), [])
    if " " not in word:
        with pytest.raises(UserError):
            expand([], [word])


def test_names_of_folders_are_short_safe_and_distinct():
    values = [
        {"stages.train.learning_rate": "1e-4", "seed": "0"},
        {"stages.train.learning_rate": "1e-4", "seed": "1"},
        {"model": "a/b"},
        {"model": "a-b"},
        {"data.train": "x" * 300},
        {"data.train": "x" * 301},
        {},
    ]
    names = [*map(folder_name, values)]
    assert names[0] == "train.learning_rate=1e-4_seed=0"
    assert len({*names}) == len(values)
    assert all("/" not in name and len(name) < 120 for name in names)
