"""Evaluation samples: which records are chosen, and the prompt of each."""

import json
from types import SimpleNamespace

import pytest
from lmx.data.record_formats import DataRecord
from lmx.pipeline.evaluate.evaluator import OPENING_WORDS, choose_items, choose_samples
from tiny_runs import EVALUATE, SCRATCH_CONFIG, TRAIN, Run


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

    def encode_chat(self, messages, *, thinking, tools, template_kwargs):
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


def test_exact_match_items_have_one_correct_answer():
    """Without a filter those with a skill, with it those with a number."""
    records = [
        chat("Add 1 and 2.", "3", "adding"),
        chat("Say it.", "it", "saying"),
        chat("Add 3 and 4.", "3 + 4 = 7\n#### 7"),
        chat("Hi?", "Yes."),
        DataRecord("x", prompt="Add 5 and 6.", completion="11", skill="adding"),
        DataRecord("x", prompt="", completion="12", skill="adding"),
        DataRecord("x", text="A text with a 5."),
        DataRecord("x", messages=({"role": "user", "content": "1"},), skill="adding"),
    ]

    def chosen(*settings):
        items = choose_items(records, 9, *settings)
        return [(i.skill, i.messages[-1]["content"], i.answer) for i in items]

    first = ("adding", "Add 1 and 2.", "3")
    completion = ("adding", "Add 5 and 6.", "11")
    assert chosen() == [first, ("saying", "Say it.", "it"), completion]
    long = ("answers", "Add 3 and 4.", "3 + 4 = 7\n#### 7")
    assert chosen("flexible-extract") == [first, long, completion]


def test_exact_match_of_numbers_in_a_run(tmp_path, base):
    evaluate = EVALUATE | {"exact_match_filter": "flexible-extract", "num_samples": 0}
    run = Run(tmp_path, {"evaluate": evaluate}, model=base)
    # No answer has a number in its first token.
    assert run("stages.evaluate.exact_match_max_tokens=1") == 0
    [warning] = [line for line in run.log.splitlines() if "warning" in line]
    assert "at most 1 tokens, and 4 of 4 expected answers are longer" in warning
    assert "raise exact_match_max_tokens" in warning
    figures = run.json("report.json")["models"]["base"]
    assert figures["exact_match"] == 0
    assert {skill[:-1] for skill in figures["exact_match_by_skill"]} == {"addition"}


def test_text_longer_than_the_positions_is_measured_without_what_does_not_fit(tmp_path):
    positions = SCRATCH_CONFIG | {"max_position_embeddings": 48}
    run = Run(tmp_path, {"train": TRAIN | {"steps": 1}}, {"evaluate": EVALUATE})
    run.model = {"from_scratch": positions}
    run.data["max_seq_length"] = 96
    valid = tmp_path / "valid.jsonl"
    long = {"role": "user", "content": "What is the sum of " + "1 + " * 60 + "1?"}
    answer = {"role": "assistant", "content": "61"}
    with valid.open("a") as file:
        for _ in range(2):
            print(json.dumps({"messages": [long, answer], "skill": "sum"}), file=file)
    run.write()
    assert run() == 0
    metrics = run.json("report.json")["models"]["fine-tuned"]
    assert "sum" not in metrics["exact_match_by_skill"]
    assert metrics["generation"]["decode_tokens_per_second"]["p50"] > 0
    assert "exact match leaves out 1 of 4 questions, which are longer" in run.log
