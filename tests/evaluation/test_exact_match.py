"""Exact-match accuracy on a model that answers from a table."""

import math
from decimal import Decimal
from types import SimpleNamespace
from typing import ClassVar, get_args

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.evaluate import EvaluateConfig
from lmx.data.answer_filters import FILTERS, last_number
from lmx.evaluation import exact_match
from lmx.evaluation.exact_match import (
    ExactMatch,
    ExactMatchItem,
    measure_exact_match,
)
from lmx.generation.engine import Generator

SIZE, END = 64, 0


class Letters:
    """A tokenizer of the 63 characters from '@' on; token 0 ends."""

    has_chat_template = False
    bos_token = None
    eos_token_ids = frozenset([END])
    added_tokens_decoder: ClassVar[dict] = {}

    def encode(self, text, *, add_special_tokens):
        return [ord(c) - 63 for c in text]

    def decode(self, tokens, **_):
        return "".join(chr(token + 63) for token in tokens)


class Next:
    """Continues the alphabet from the last letter up to 'E', then ends."""

    def __init__(self):
        self.calls = 0

    def __call__(self, tokens, cache=None):
        self.calls += 1
        end = ord("E") - 63
        follows = mx.where(tokens < end, tokens + 1, END)
        return follows[..., None] == mx.arange(SIZE)

    def make_cache(self):
        return []


def question(prompt, answer, skill):
    return ExactMatchItem([{"role": "user", "content": prompt}], answer, skill)


def test_exact_match_by_skill():
    questions = [
        question("A", "BCDE", "long"),
        question("XB", " CDE\n", "long"),
        question("D", "E", "short"),
        question("D", "F", "short"),
        question("E", "", "empty"),
    ]
    accuracy = measure_exact_match(Generator(Next(), Letters()), questions)
    assert accuracy.by_skill == {"empty": (1, 1), "long": (2, 2), "short": (1, 2)}
    assert accuracy.overall == pytest.approx(0.8)
    assert accuracy.stderr == pytest.approx(math.sqrt(0.8 * 0.2 / 5))
    assert accuracy.wrong == [(questions[3], "E")]


def test_exact_match_requires_the_full_answer():
    questions = [question("A", "BCD", "x"), question("A", "BCDEF", "x")]
    generator = Generator(Next(), Letters())
    assert measure_exact_match(generator, questions).overall == 0
    cut = measure_exact_match(generator, questions, max_tokens=3)
    assert cut.by_skill == {"x": (1, 2)}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18 - 3 = 15, so 15 * 2 = 30.\n#### 30", "30"),
        ("#### 42", "42"),
        ("The total is $1,234.50.", "1234.5"),
        ("1,000,000 stars", "1000000"),
        ("42.", "42"),
        ("It is 42.0", "42"),
        ("**7**", "7"),
        ("-5", "-5"),
        ("It fell by \u22125 degrees", "-5"),
        ("-$5", "-5"),
        ("$-5.25", "-5.25"),
        # A minus between two numbers is no sign.
        ("9-5", "5"),
        ("9 - 5", "5"),
        ("(9)-5", "5"),
        # No thousands separators.
        ("2, 7, 85", "85"),
        ("1,2,3", "3"),
        ("1,2345", "2345"),
        ("50%", "50"),
        # Only numbers after the mark count, if there are any.
        ("7 #### 8 ####", "8"),
        ("#### 3 and then 4", "4"),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "no number", "####", "-", "$", "one"])
def test_last_number_of_an_answer_without_one(text):
    assert last_number(text) is None


def test_exact_match_compares_what_the_filter_extracts(monkeypatch):
    answers = ["2 + 2 = 4\n#### 4", "It is 1,000.", "5", "I do not know", "-4"]
    expected = ["#### 4", "1000", "#### 6", "#### 0", "4"]
    items = [question("A", answer, "x") for answer in expected]
    generator = Generator(Next(), Letters())
    results = [SimpleNamespace(text=answer) for answer in answers]
    monkeypatch.setattr(exact_match, "generate_requests", lambda *_: results)
    by_filter = {
        name: measure_exact_match(generator, items, answer_filter=chosen).correct
        for name, chosen in FILTERS.items()
    }
    assert by_filter == {"none": [0] * 5, "flexible-extract": [1, 1, 0, 0, 0]}


def test_every_filter_of_the_recipe_exists():
    annotation = EvaluateConfig.model_fields["exact_match_filter"].annotation
    assert set(get_args(annotation)) == FILTERS.keys()


def test_exact_match_batches_prompts_and_keeps_few_wrong_answers():
    model = Next()
    questions = [question("AA", "no", "x") for _ in range(30)]
    accuracy = measure_exact_match(Generator(model, Letters()), questions)
    # One pass for each prompt, and then all together.
    assert model.calls < 30 + 20
    assert len(accuracy.wrong) == 5
    assert (accuracy.overall, accuracy.stderr) == (0, 0)


def test_exact_match_change_has_a_paired_error():
    """Two of four answers become right, one becomes wrong: a change of +1/4."""
    before = ExactMatch(0.5, 0.0, {}, [], [1, 0, 0, 1])
    after = ExactMatch(0.75, 0.0, {}, [], [1, 1, 1, 0])
    differences = np.array([0, 1, 1, -1])
    change, stderr = after.change_from(before)
    assert change == pytest.approx(0.25)
    assert stderr == pytest.approx(differences.std() / 2)
    assert after.change_from(after) == (0, 0)
