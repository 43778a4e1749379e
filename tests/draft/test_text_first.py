"""Text is chosen at random, and trained before the completions."""

import numpy as np
import pytest
from lmx.data.batching import InMemoryExamples
from lmx.data.tokenization import Example
from lmx.draft.text_first import TextFirst, choose_text

LENGTHS = (5, 9, 4, 7, 6)


class Steps:
    def __init__(self, name):
        self.digest = name

    def __call__(self, step):
        return self.digest, step


def test_text_comes_first():
    batches = TextFirst(Steps("text"), 2, Steps("completions"))
    assert [batches(step) for step in range(4)] == [
        ("text", 0),
        ("text", 1),
        ("completions", 0),
        ("completions", 1),
    ]
    digests = {
        TextFirst(Steps(text), count, Steps(completions)).digest
        for text, count, completions in (
            ("text", 2, "completions"),
            ("other", 2, "completions"),
            ("text", 3, "completions"),
            ("text", 2, "others"),
        )
    }
    assert len(digests) == 4


@pytest.mark.parametrize("limit", [3, 12, 31, 1000])
def test_text_is_a_random_part(limit):
    examples = InMemoryExamples(
        Example(np.arange(n, dtype=np.int32), np.arange(n) > 0, str(n)) for n in LENGTHS
    )
    chosen = [
        [len(example.tokens) for example in choose_text(examples, limit, seed=seed)]
        for seed in range(4)
    ]
    for lengths in chosen:
        assert sum(lengths) <= limit
        assert {*lengths} <= {*LENGTHS}
        assert len(lengths) == len({*lengths})
    if limit >= sum(LENGTHS):
        assert sorted(chosen[0]) == sorted(LENGTHS)
        assert chosen[0] != chosen[1] or chosen[0] != chosen[2]
    for example in choose_text(examples, limit, seed=0):
        assert example.mask.tolist() == [False] + [True] * (len(example.tokens) - 1)
