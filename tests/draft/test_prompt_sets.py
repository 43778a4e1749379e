"""Benchmark prompts by kind: chat, text and copying."""

from pathlib import Path

import pytest
from lmx.data.record_formats import DataRecord
from lmx.draft.dataset import COPY_INSTRUCTION, prompt_sets
from lmx.models.loader import load_tokenizer

TINY_BASE = Path(__file__).parents[2] / "data/tiny-base"
TEXT = "def add(a, b):\n    return a + b\n\n\ndef take(a, b):\n    return a - b\n"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY_BASE)


def chat(number):
    turns = ("user", f"Add {number} and 1."), ("assistant", f"It is {number + 1}!")
    messages = tuple({"role": role, "content": content} for role, content in turns)
    return DataRecord(f"chats:{number}", messages=messages)


def decoded_sets(records, tokenizer, count=6, max_prompt_tokens=200):
    sets = prompt_sets(
        records, tokenizer, count=count, max_prompt_tokens=max_prompt_tokens
    )
    return {
        k: [tokenizer.decode(p.tokens) for p in prompts] for k, prompts in sets.items()
    }


def test_prompt_sets_split_evenly_with_copying(tokenizer):
    records = [DataRecord(f"texts:{n}", text=TEXT) for n in range(9)] + [
        chat(n) for n in range(9)
    ]
    sets = decoded_sets(records, tokenizer)
    assert {kind: len(prompts) for kind, prompts in sets.items()} == {
        "chat": 2,
        "text": 2,
        "copying": 2,
    }
    assert TEXT.startswith(sets["text"][0])
    assert "Add 1 and 1." in sets["chat"][1]
    assert "It is" not in sets["chat"][1]
    assert list(decoded_sets(records[9:], tokenizer)) == ["chat", "copying"]


def test_copy_prompts_contain_completion(tokenizer):
    (prompt,) = decoded_sets([chat(4)], tokenizer, count=2)["copying"]
    assert prompt.index("It is 5!") < prompt.index(COPY_INSTRUCTION)
    record = DataRecord("pairs:1", prompt="Name a colour.", completion="Blue.")
    (prompt,) = decoded_sets([record], tokenizer, count=2)["copying"]
    assert (
        prompt.index("Name a colour.")
        < prompt.index("Blue.")
        < prompt.index(COPY_INSTRUCTION)
    )
    (prompt,) = decoded_sets([DataRecord("texts:1", text=TEXT)], tokenizer, count=2)[
        "copying"
    ]
    half = TEXT[: len(TEXT) // 2]
    # The first half of the text, then its beginning again.
    assert prompt.startswith(half)
    assert half.startswith(prompt[len(half) :].strip("\n"))
    assert 10 < len(prompt) - len(half) < len(half)


def test_copy_prompts_skip_tool_calls(tokenizer):
    turns = (
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": ""},
    )
    turns[1]["tool_calls"] = [{"function": {"name": "add", "arguments": {}}}]
    assert "copying" not in prompt_sets(
        [DataRecord("tools:1", messages=turns)],
        tokenizer,
        count=2,
        max_prompt_tokens=200,
    )


def test_prompt_sets_skip_long_prompts(tokenizer):
    records = [
        DataRecord("texts:long", text=TEXT * 9),
        DataRecord("texts:short", text=TEXT),
    ]
    sets = prompt_sets(records, tokenizer, count=4, max_prompt_tokens=60)
    assert {prompt.where for prompts in sets.values() for prompt in prompts} == {
        "texts:short"
    }
    assert not prompt_sets(records, tokenizer, count=4, max_prompt_tokens=3)
