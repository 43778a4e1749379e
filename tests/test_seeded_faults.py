"""The texts of `seeded_faults.txt` follow the code."""

import pytest
from seeded_faults import ROOT, read_faults

FILES = [path.read_text() for path in (ROOT / "toolkit").rglob("*.py")]


@pytest.mark.parametrize(("text", "replacement"), read_faults())
def test_a_fault_has_one_place(text, replacement):
    assert sum(content.count(text) for content in FILES) == 1
    assert text != replacement
