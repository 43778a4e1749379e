"""Changes in the text of a recipe leave the rest as it is."""

import pytest
from lmx.config import bundled
from lmx.config.recipe_text import (
    set_value,
    summary,
    with_schema_line,
    without_key,
    without_schema_line,
)
from lmx.config.yaml_io import read

TEXT = """\
# A title.
# More.
model: a/b  # the model
data: {train: [x, y], max_seq_length: 8}
stages:
  - train: {steps: 1, batch_size: 2}  # first
  - quantize:
      bits: 4 # second
      calibration: {max_seq_length: 8}
"""


def test_schema_line_is_replaced_and_removed():
    once = with_schema_line(TEXT, "schema.json")
    assert once == f"# yaml-language-server: $schema=schema.json\n{TEXT}"
    assert with_schema_line(once, "b").startswith("# yaml-language-server: $schema=b\n")
    assert without_schema_line(with_schema_line(once, "b")) == TEXT


def test_summary_is_the_first_comment_of_the_author():
    assert summary(with_schema_line(TEXT, "schema.json")) == "A title."
    assert summary("model: a\n") == ""


def test_set_value_keeps_comments_and_layout():
    text = set_value(TEXT, ("model",), "c d/e")
    text = set_value(text, ("data", "train"), "z.jsonl")
    text = set_value(text, ("stages", 0, "train", "batch_size"), 7, key="batch_tokens")
    text = set_value(text, ("stages", 1, "quantize", "bits"), 3)
    text = set_value(text, ("stages", 1, "quantize", "calibration"), {"num_tokens": 9})
    expected = TEXT
    for old, new in {
        "a/b": "c d/e",
        "[x, y]": "z.jsonl",
        "batch_size: 2": "batch_tokens: 7",
        "bits: 4": "bits: 3",
        "{max_seq_length: 8}\n": "{num_tokens: 9}\n",
    }.items():
        expected = expected.replace(old, new)
    assert text == expected


VALUES = [
    "a, b", "x: y", "{a}", "# x", "1e-5", "yes", "null", "", "C:\\x", "Ünï", "a\nb",
    ["a, b", 1], {"a": "x: y"}, None, True, 0.002,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize("path", [("model",), ("data", "train")], ids=["block", "flow"])
def test_set_value_writes_the_value_itself(value, path):
    data = read(set_value(TEXT, path, value)).data
    expected = read(TEXT).data
    (expected if len(path) == 1 else expected["data"])[path[-1]] = value
    assert data == expected


def test_without_key_removes_its_line():
    text = without_key(TEXT, ("stages", 1, "quantize", "calibration"))
    assert text == TEXT.replace("      calibration: {max_seq_length: 8}\n", "")
    with pytest.raises(AssertionError):
        without_key(TEXT, ("stages", 1, "quantize"))


@pytest.mark.parametrize(
    "path", bundled.bundled_recipes().values(), ids=lambda p: p.stem
)
def test_included_recipe_names_its_schema(path):
    first = path.read_text().splitlines()[0]
    address = first.removeprefix("# yaml-language-server: $schema=")
    assert path.parent / address == bundled.schema_file()
    assert bundled.schema_file().is_file()
