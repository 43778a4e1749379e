"""The rows whose answers are shown side by side, and what is asked of them."""

from types import SimpleNamespace

import pytest
from lmx.data.record_formats import DataRecord
from lmx.pipeline.evaluator import OPENING_WORDS, choose_samples


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
def test_sample_prompt_of_every_record_format(row, prompt, expected):
    [shown] = choose_samples([row], 4)
    shown.generate("fine-tuned", Generator())
    assert shown.to_json() == {
        "prompt": prompt,
        "expected": expected,
        "answers": {"fine-tuned": prompt.upper()},
    }


def test_sample_prompt_of_text_is_its_opening():
    [shown] = choose_samples([DataRecord("x", text="word " * 500)], 4)
    assert shown.prompt == " ".join(["word"] * OPENING_WORDS)


def test_overlong_sample_prompt_has_no_answer():
    [shown] = choose_samples([chat("a" * 31, "b")], 4)
    shown.generate("fine-tuned", Generator())
    assert shown.answers == {}


def test_samples_alternate_skills_and_skip_empty_prompts():
    rows = [chat(f"{skill}{n}", "x", skill) for skill in "ab" for n in range(3)]
    rows.insert(0, DataRecord("x", prompt="", completion="unasked"))
    assert [row.prompt for row in choose_samples(rows, 3)] == ["a0", "b0", "a1"]
    assert choose_samples(rows, 0) == []
