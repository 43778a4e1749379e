"""Exact match: filters of answers, rates by skill, paired changes."""

from decimal import Decimal
from typing import get_args

import numpy as np
import pytest
from lmx.config.evaluate import ExactMatchConfig
from lmx.data.answer_filters import FILTERS, SHORT, has_one_form, last_number
from lmx.evaluation.exact_match import measure_exact_match


def test_exact_match_by_skill():
    """White space around an answer is ignored, all else counts."""
    result = measure_exact_match(
        [
            ("long", "BCDE", "BCDE"),
            ("long", " CDE\n", "CDE"),
            ("short", "E", "E "),
            ("short", "F", "E"),
            ("short", "EF", "E"),
            ("empty", "", ""),
        ]
    )
    rates = {k: (v["rate"], v["questions"]) for k, v in result.by_skill.items()}
    assert rates == {"empty": (1, 1), "long": (1, 2), "short": (1 / 3, 3)}
    stderr = result.by_skill["short"]["stderr"]
    assert stderr == pytest.approx((1 / 3 * 2 / 3 / 3) ** 0.5)
    assert result.correct == [1, 1, 1, 0, 0, 1]
    assert result.overall == pytest.approx(4 / 6)
    assert result.stderr == pytest.approx((4 / 6 * 2 / 6 / 6) ** 0.5)


@pytest.mark.parametrize(
    ("answer", "is_right", "fields"),
    [
        ('{"b": [1, 2], "a": "x"}\n', True, "ab"),
        ('{"a":"x","b":[1,2]}', True, "ab"),
        ('{"a": "x", "b": [1.0, 2]}', False, "a"),
        ('{"a": "x", "b": [1, 2], "c": 3}', False, "ab"),
        ('{"b": [1, 2]}', False, "b"),
        ('{"a": "x", "a": "x", "b": [1, 2]}', False, ""),
        ('{"a": "x", "b": [1, 2]', False, ""),
        ('[{"a": "x"}]', False, ""),
        ("", False, ""),
    ],
)
def test_json_is_compared_by_value_and_field(answer, is_right, fields):
    result = measure_exact_match([("x", '{"a": "x", "b": [1, 2]}', answer)])
    assert result.correct == [is_right]
    found = {key: rate["rate"] for key, rate in result.by_field.items()}
    assert found == {key: float(key in fields) for key in "ab"}


def test_fields_are_keys_of_many_answers():
    rows = [("x", f'{{"a": {n}, "name {n}": 1}}', '{"a": 3}') for n in range(40)]
    rows.append(("x", "none", "none"))
    [(field, figures)] = measure_exact_match(rows).by_field.items()
    assert (field, figures["rate"]) == ("a", 1 / 40)
    assert figures["stderr"] == pytest.approx((39 / 40 / 40 / 40) ** 0.5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("yes", True),
        (" 7 \n", True),
        ("x" * SHORT, True),
        ("x" * (SHORT + 1), False),
        ("one\ntwo", False),
        (" ", False),
        ('{"a": "' + "x" * 200 + '"}', True),
        ("[\n" + "1,\n" * 50 + "1]", True),
        ("[" * 100_000, False),
    ],
)
def test_answers_that_have_one_form(text, expected):
    assert has_one_form(text) is expected


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


def test_exact_match_compares_what_the_filter_extracts():
    answers = ["2 + 2 = 4\n#### 4", "It is 1,000.", "5", "I do not know", "-4"]
    expected = ["#### 4", "1000", "#### 6", "#### 0", "4"]
    rows = [("x", *pair) for pair in zip(expected, answers, strict=True)]
    by_filter = {
        name: measure_exact_match(rows, chosen).correct
        for name, chosen in FILTERS.items()
    }
    assert by_filter == {"none": [0] * 5, "flexible-extract": [1, 1, 0, 0, 0]}
    annotation = ExactMatchConfig.model_fields["filter"].annotation
    assert set(get_args(annotation)) == FILTERS.keys()


def test_exact_match_change_has_a_paired_error():
    """Two of four answers become right, one becomes wrong: a change of +1/4."""

    def answers(correct):
        return measure_exact_match([("x", "1", str(value)) for value in correct])

    before, after = answers([1, 0, 0, 1]), answers([1, 1, 1, 0])
    change, stderr = after.change_from(before)
    assert change == pytest.approx(0.25)
    assert stderr == pytest.approx(np.array([0, 1, 1, -1]).std() / 2)
    assert after.change_from(after) == (0, 0)
