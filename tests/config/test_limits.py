"""Recipes that are too large, too deep, or not text: one clear error, and fast."""

import time

import pytest
from lmx.config.loader import MAX_BYTES, load_recipe
from lmx.errors import UserError

GOOD = """model: some/model
data: {train: rows.jsonl}
stages:
  - train: {steps: 2, batch_size: 2}
"""
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)


def nested_blocks(depth: int) -> str:
    return GOOD + "".join(" " * n + f"k{n}:\n" for n in range(depth))


def error_of(tmp_path, text: str) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    start = time.process_time()
    with pytest.raises(UserError) as caught:
        load_recipe(path)
    assert time.process_time() - start < 2
    message = str(caught.value)
    assert max(map(len, message.splitlines())) < 300 + len(str(path))
    return message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB + GOOD, "more than 100,000 values"),
        (GOOD + "# " + MAX_BYTES * "x", "at most 1,048,576 bytes"),
        (GOOD + "seed: " + 50_000 * "[", "more than 50 levels deep"),
        (GOOD + "seed: " + 60 * "[" + 60 * "]", "more than 50 levels deep"),
        (nested_blocks(60), "more than 50 levels deep"),
        (nested_blocks(1200), "more than 50 levels deep"),
        (GOOD + 200 * "  - evaluate:\n", "has 201 entries, at most 100"),
        (GOOD + "seed: 4294967296", "at most 4,294,967,295"),
        (GOOD.replace("steps: 2", "epochs: 1.0e308"), "4:21: a number is at most 4,"),
        (GOOD.replace("steps: 2", "epochs: 5.0e9"), "a number is at most 4,294,967,29"),
        (GOOD.replace("steps: 2", "epochs: -1.0e308"), "a number is at most 4,294,9"),
        (GOOD.replace("steps: 2", "epochs: .inf"), "expected a finite number"),
        (GOOD + f"  - draft: {{budget: {400 * '9'}}}", "a number is at most 4,294,9"),
        (GOOD + f"  - draft: {{budget: {400 * '9'}h}}", "budget is a time such as"),
        (GOOD + "  - draft: {budget: 3٣h}", "5:13: budget is a time such as"),
        (GOOD + "  - draft: {budget: ٣h}", "budget is a time such as"),
        (GOOD + f"  - draft: {{budget: {800_000 * '9'}x}}", "budget is a time such as"),
        (GOOD.replace("size: 2", "size: 99999999999999"), "at most 4,294,967,295"),
        (GOOD + "seed: " + 5000 * "9", "does not match its tag"),
        (GOOD + 'output: "a\\0b"', "a NUL character"),
        (GOOD + 'output: "\\ud800"', "half of a surrogate pair"),
        (GOOD + '"\\udfff": 1', "half of a surrogate pair"),
        (GOOD + f"output: {'x' * 300}", "over 255 bytes"),
        (GOOD + f"output: {'x/' * 3000}", "more than 3,500 bytes"),
        (GOOD + "output: ~no-such-user/run", "no user no-such-user"),
    ],
)
def test_bad_recipe_has_a_clear_error(tmp_path, text, message):
    assert message in error_of(tmp_path, text)


def test_recipe_with_many_errors_shows_the_first(tmp_path):
    unknown = "".join(f"key{n}: 1\n" for n in range(1000))
    message = error_of(tmp_path, GOOD + unknown)
    assert message.count("unknown key") == 20
    assert message.endswith("... and 980 more\n1000 problems; nothing was run.")


@pytest.mark.parametrize("value", ["rtn", "[1]", "{a: 1}", "null", "7"])
@pytest.mark.parametrize(
    "block", ["train: {steps: 2, batch_size: 2, qat: {bits: 4, %s}}", "export: {%s}"]
)
def test_method_in_a_block_without_one_is_an_unknown_key(tmp_path, block, value):
    """The natural mistake for `qat`."""
    stage = block % f"method: {value}"
    text = GOOD.replace("train: {steps: 2, batch_size: 2}", stage)
    assert "unknown key 'method'" in error_of(tmp_path, text)
