"""The rows whose answers are shown side by side, and what is asked of them."""

from types import SimpleNamespace

import pytest
from lmx.data.record_formats import DataRecord
from lmx.pipeline.evaluate import OPENING_WORDS, choose_samples


def chat(asked, answer, skill=None):
    turns = (
        {"role": "user", "content": asked},
        {"role": "assistant", "content": answer},
    )
    return DataRecord("here:1", messages=turns, skill=skill)


class Generator:
    """Says what it was given."""

    max_positions = 30

    def encode_chat(self, messages, *, thinking):
        assert not thinking
        return [*messages[-1]["content"]]

    def encode_text(self, text):
        return [*text]

    def generate(self, prompt, *, max_tokens):
        return SimpleNamespace(text="".join(prompt).upper())


@pytest.mark.parametrize(
    ("row", "prompt", "expected"),
    [
        (chat("Hi?", "Yes."), "Hi?", "Yes."),
        (DataRecord("x", prompt="one plus", completion=" two"), "one plus", " two"),
        (DataRecord("x", text="To be\nor not"), "To be or not", None),
    ],
)
def test_every_kind_of_row_asks_for_something(row, prompt, expected):
    [shown] = choose_samples([row], 4)
    shown.generate("fine-tuned", Generator())
    assert shown.to_json() == {
        "prompt": prompt,
        "expected": expected,
        "answers": {"fine-tuned": prompt.upper()},
    }


def test_of_a_text_the_opening_is_shown():
    [shown] = choose_samples([DataRecord("x", text="word " * 500)], 4)
    assert shown.prompt == " ".join(["word"] * OPENING_WORDS)


def test_what_the_model_cannot_read_has_no_answer():
    [shown] = choose_samples([chat("a" * 31, "b")], 4)
    shown.generate("fine-tuned", Generator())
    assert shown.answers == {}


def test_kinds_come_in_turn_and_empty_rows_not_at_all():
    rows = [chat(f"{skill}{n}", "x", skill) for skill in "ab" for n in range(3)]
    rows.insert(0, DataRecord("x", prompt="", completion="unasked"))
    assert [row.prompt for row in choose_samples(rows, 3)] == ["a0", "b0", "a1"]
    assert choose_samples(rows, 0) == []
