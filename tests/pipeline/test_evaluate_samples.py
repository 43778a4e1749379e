"""Questions of an evaluation: which examples are asked, and their answers."""

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import mlx.core as mx
import pytest
from lmx.data.record_formats import DataRecord
from lmx.generation.generator import Generator
from lmx.generation.kv_cache.batch import is_batchable
from lmx.pipeline.evaluate.questions import (
    OPENING_WORDS,
    Question,
    Questions,
    distinct_tokens,
)
from processes import in_turn
from tiny_runs import EVALUATE, SCRATCH_CONFIG, TRAIN, Run

SIZE, END = 64, 0


def chat(prompt, completion, skill=None):
    turns = (
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": completion},
    )
    return DataRecord("rows:1", messages=turns, skill=skill)


class Letters:
    """A tokenizer of the 63 characters from '@' on; token 0 ends."""

    bos_token = None
    eos_token_ids = frozenset([END])
    added_tokens_decoder = {}  # noqa: RUF012
    has_thinking = False

    def __init__(self, has_chat_template=False):
        self.has_chat_template = has_chat_template

    def encode(self, text, **_):
        return [ord(c) - 63 for c in text]

    def decode(self, tokens, **_):
        return "".join(chr(token + 63) for token in tokens)

    def apply_chat_template(self, messages, *, tokenize, **options):
        assert not tokenize
        assert not options["enable_thinking"]
        return f"[{messages[-1]['content']}]C"


class Next:
    """Continues the alphabet from the last letter up to 'E', then ends."""

    def __init__(self, positions=None):
        self.calls = 0
        self.args = SimpleNamespace(max_position_embeddings=positions)

    def __call__(self, tokens, cache=None):
        self.calls += 1
        end = ord("E") - 63
        follows = mx.where(tokens < end, tokens + 1, END)
        return follows[..., None] == mx.arange(SIZE)

    def make_cache(self):
        return []


def answers(
    records,
    model=None,
    tokenizer=None,
    max_tokens=9,
    *,
    thinking_budget=None,
    **ranks,
):
    """Answers by prompt of all records as samples, and the work that was counted."""
    questions = Questions.choose(records, len(records), 0, "none")
    questions.thinking_budget = thinking_budget
    counted = Counter()
    generator = Generator(model or Next(), tokenizer or Letters())
    questions.answer("base", generator, max_tokens, counted.update, **ranks)
    return {q.prompt: q.answers.get("base") for q in questions}, counted


@pytest.mark.parametrize("is_wrong", [False, True])
def test_ranks_answer_their_shares(is_wrong):
    """The prompts differ in length, and the first rank counts for both."""
    records = [chat(prompt, "") for prompt in ("AB", "D", "A", "BC")]
    one, _ = answers(records)
    shared, counted = in_turn(
        lambda ranks: answers(records, ranks=ranks), is_wrong=is_wrong
    )
    assert shared.keys() == one.keys()
    assert (shared == one) != is_wrong
    assert counted["tokens"] == pytest.approx(5)


@pytest.mark.parametrize(
    ("record", "prompt", "expected"),
    [
        (chat("Hi?", "Yes."), "Hi?", "Yes."),
        (DataRecord("x", prompt="one plus", completion=" two"), "one plus", " two"),
        (DataRecord("x", text="To be\nor not"), "To be or not", None),
        (replace(chat("Hi?", "No."), label=False), "Hi?", None),
        (
            DataRecord("x", text="word " * 500),
            " ".join(["word"] * OPENING_WORDS),
            None,
        ),
    ],
)
def test_question_of_every_record_format(record, prompt, expected):
    question = Question(record)
    shown = {"prompt": prompt, "expected": expected, "answers": {}}
    assert question.to_json() == shown


def test_questions_are_asked_as_they_are_trained():
    """Chats and prompts with the chat template, which ends in a C; texts without it."""
    records = [chat("A", ""), DataRecord("x", prompt="B", completion="C")]
    records.append(DataRecord("x", text="D"))
    plain, counted = answers(records)
    assert plain == {"A": "BCDE", "B": "CDE", "D": "E"}
    # The longest answer has four letters and the token that ends it.
    assert counted == {"tokens": 3, "steps": 5}
    with_template, _ = answers(records, tokenizer=Letters(has_chat_template=True))
    assert with_template == {"A": "DE", "B": "DE", "D": "E"}


class Thinker(Letters):
    """A chain of thought stands between ^ and _; the prompt begins it."""

    has_thinking = True
    think_start, think_end = "^", "_"
    think_start_tokens, think_end_tokens = (31,), (32,)

    def encode(self, text, **_):
        return [ord(c.replace("\n", "@")) - 63 for c in text]

    def convert_tokens_to_ids(self, texts):
        return [None] * len(texts)  # it has no other marks, and no unknown token

    def rfind_think_start(self, tokens, start=None):
        return len(tokens) - 1 if tokens and tokens[-1] == 31 else -1

    def apply_chat_template(self, messages, *, tokenize, **options):
        return f"[{messages[-1]['content']}]" + "^" * options["enable_thinking"]


class Ponder(Next):
    """Thinks ABCDEABCDE... until it is stopped, then answers abc; at once, too."""

    def __call__(self, tokens, cache=None):
        parts = map(Thinker().encode, ("^ABCDEA", "_abc", "]a"))
        after = {a: b for part in parts for a, b in pairwise(part)}
        follows = [[after.get(t, END) for t in row] for row in tokens.tolist()]
        return mx.array(follows)[..., None] == mx.arange(SIZE)


def test_models_think_within_a_budget_before_they_answer():
    records = [chat("A", "abc"), chat("BB", "abc")]
    for budget in (None, 0, 3, 12):
        model, tokenizer = Ponder(), Thinker(has_chat_template=True)
        found, _ = answers(records, model, tokenizer, 4, thinking_budget=budget)
        assert found == {"A": "abc", "BB": "abc"}, budget


def test_a_model_that_cannot_think_gets_no_budget(tmp_path, base):
    run = Run(tmp_path, {"evaluate": EVALUATE}, model=base)
    assert run("stages.evaluate.thinking_budget=8") == 2
    assert "thinking_budget of evaluate: this model has no chain" in run.log


def test_answers_have_a_limit_and_overlong_questions_have_none():
    assert answers([chat("A", "")], max_tokens=2)[0] == {"A": "BC"}
    records = [chat("A" * 31, ""), chat("A" * 30, "")]
    assert answers(records, Next(positions=30))[0] == {"A" * 31: None, "A" * 30: "B"}


def test_questions_are_answered_in_one_batch():
    model = Next()
    assert is_batchable(model)
    model.calls = 0
    found, _ = answers([chat("A" * n, "") for n in range(1, 31)], model)
    assert {*found.values()} == {"BCDE"}
    # One pass for each prompt, and then all together.
    assert model.calls < 30 + 10
    # What prompts have in common is processed once.
    prompts = [[1, 1, 2], [1, 1, 3], [2], [1, 1], [1, 1, 3]]
    assert distinct_tokens(prompts) == 5


def test_samples_alternate_skills_and_skip_empty_prompts():
    records = [chat(f"{skill}{n}", "x", skill) for skill in "ab" for n in range(3)]
    records.insert(0, DataRecord("x", prompt="", completion="unused"))
    chosen = Questions.choose(records, 3, 2, "none")
    assert [question.prompt for question in chosen.samples] == ["a0", "b0", "a1"]
    assert [question.prompt for question in chosen.exact] == ["a0", "b0"]
    # A sample that is an exact question, too, is asked once.
    assert len([*chosen]) == 3
    assert Questions.choose(records, 0, 0, "none").samples == []


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
        replace(chat("Add 7 and 8.", "16", "adding"), label=False),
    ]

    def chosen(*settings):
        exact = Questions.choose(records, 0, 9, *settings).exact
        return [(q.skill, q.prompt, q.expected) for q in exact]

    first = ("adding", "Add 1 and 2.", "3")
    completion = ("adding", "Add 5 and 6.", "11")
    assert chosen("none") == [first, ("saying", "Say it.", "it"), completion]
    long = ("answers", "Add 3 and 4.", "3 + 4 = 7\n#### 7")
    assert chosen("flexible-extract") == [long, first, completion]


def test_without_skills_short_answers_and_json_are_questions():
    long = "It depends on what you mean by it, which is for you to say, of course."
    records = [chat("A?", "yes"), chat("B?", long), chat("C?", '{"a":\n1}')]
    exact = Questions.choose(records, 0, 9, "none").exact
    assert [q.prompt for q in exact] == ["A?", "C?"]
    # Who names skills decides.
    records.append(chat("D?", long, "explaining"))
    assert [q.prompt for q in Questions.choose(records, 0, 9, "none").exact] == ["D?"]


JSON_ANSWER = json.dumps({"device": "lamp", "time": None})


@pytest.mark.parametrize(
    ("answer", "skills", "lines"),
    [
        (JSON_ANSWER, [None] * 3, ["device", "time"]),
        (JSON_ANSWER, ["short", "long", "long"], ["short", "long", "device", "time"]),
        # One skill is the whole; many are in the report alone.
        (JSON_ANSWER, ["short"] * 3, ["device", "time"]),
        (JSON_ANSWER, [*"abcde"], ["device", "time"]),
        ("on " * 40, [None] * 3, []),
    ],
)
def test_exact_match_by_skill_and_field(tmp_path, base, answer, skills, lines):
    row = {"prompt": "On.", "completion": answer}
    rows = [row | ({"skill": skill} if skill else {}) for skill in skills]
    evaluate = EVALUATE | {"latency_tokens": None, "exact_match": {"samples": 5}}
    run = Run(tmp_path, {"evaluate": evaluate}, model=base)
    (tmp_path / "valid.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in rows))
    assert run() == 0
    figures = run.json("report.json")["models"]["base"]
    shown = re.findall(r"exact match, (\w+) ", run.log)
    assert sorted(shown) == sorted(lines)
    if lines:
        assert figures["exact_match"] == 0
    else:
        assert "exact_match" not in figures
        assert "exact match is not measured: no answer is JSON or a line" in run.log


def test_exact_match_of_numbers_in_a_run(tmp_path, base):
    evaluate = EVALUATE | {
        "exact_match": {"samples": 4, "filter": "flexible-extract"},
        "num_samples": 0,
    }
    evaluate["latency_tokens"] = None
    run = Run(tmp_path, {"evaluate": evaluate}, model=base)
    # No answer has a number in its first token.
    assert run("stages.evaluate.max_tokens=1") == 0
    [warning] = [line for line in run.log.splitlines() if "warning" in line]
    assert "at most 1 tokens, and 4 of 4 expected answers are longer" in warning
    assert "raise max_tokens" in warning
    figures = run.json("report.json")["models"]["base"]
    assert figures["exact_match"] == 0
    assert {skill[:-1] for skill in figures["exact_match_by_skill"]} == {"addition"}
    # What nobody asked for is not measured, and has no row.
    assert not {"generation", "speculation", "kl_mean"} & figures.keys()
    assert "TTFT" not in run.log
    assert "KL" not in run.log


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
