"""Evaluation samples: which records are chosen, and the prompt of each."""

from types import SimpleNamespace

import pytest
from lmx.data.record_formats import DataRecord
from lmx.pipeline.evaluator import OPENING_WORDS, choose_samples


def chat(prompt, completion, skill=None):
    turns = (
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": completion},
    )
    return DataRecord("rows:1", messages=turns, skill=skill)


class Generator:
    """Returns the prompt in upper case; with a chat template, between brackets."""

    max_positions = 30

    def __init__(self, chat_template=None):
        self.tokenizer = SimpleNamespace(chat_template=chat_template)

    def encode_chat(self, messages, *, thinking):
        assert not thinking
        text = messages[-1]["content"]
        return [*(f"<{text}>" if self.tokenizer.chat_template else text)]

    def encode_text(self, text):
        return [*text]

    def generate(self, prompt, *, max_tokens):
        return SimpleNamespace(text="".join(prompt).upper())


@pytest.mark.parametrize(
    ("record", "prompt", "expected"),
    [
        (chat("Hi?", "Yes."), "Hi?", "Yes."),
        (DataRecord("x", prompt="one plus", completion=" two"), "one plus", " two"),
        (DataRecord("x", text="To be\nor not"), "To be or not", None),
    ],
)
def test_sample_prompt_of_every_record_format(record, prompt, expected):
    [sample] = choose_samples([record], 4)
    sample.generate("fine-tuned", Generator())
    assert sample.to_json() == {
        "prompt": prompt,
        "expected": expected,
        "answers": {"fine-tuned": prompt.upper()},
    }


def test_prompts_are_asked_with_the_chat_template_they_are_trained_with():
    record = DataRecord("x", prompt="one plus", completion=" two")
    [sample] = choose_samples([record], 4)
    sample.generate("base", Generator())
    sample.generate("fine-tuned", Generator("{{ messages }}"))
    assert sample.answers == {"base": "ONE PLUS", "fine-tuned": "<ONE PLUS>"}
    [text] = choose_samples([DataRecord("x", text="To be")], 4)
    text.generate("fine-tuned", Generator("{{ messages }}"))
    assert text.answers == {"fine-tuned": "TO BE"}


def test_sample_prompt_of_text_is_its_opening():
    [sample] = choose_samples([DataRecord("x", text="word " * 500)], 4)
    assert sample.prompt == " ".join(["word"] * OPENING_WORDS)


def test_overlong_sample_prompt_has_no_answer():
    [sample] = choose_samples([chat("a" * 31, "b")], 4)
    sample.generate("fine-tuned", Generator())
    assert sample.answers == {}


def test_samples_alternate_skills_and_skip_empty_prompts():
    records = [chat(f"{skill}{n}", "x", skill) for skill in "ab" for n in range(3)]
    records.insert(0, DataRecord("x", prompt="", completion="unused"))
    assert [record.prompt for record in choose_samples(records, 3)] == [
        "a0",
        "b0",
        "a1",
    ]
    assert choose_samples(records, 0) == []
