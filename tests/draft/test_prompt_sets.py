"""What a draft is tried on: kinds of prompts, how they share, and copying."""

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
    messages = tuple({"role": role, "content": said} for role, said in turns)
    return DataRecord(f"chats:{number}", messages=messages)


def taken(rows, tokenizer, count=6, longest=200):
    found = prompt_sets(rows, tokenizer, count=count, max_prompt_tokens=longest)
    return {k: [tokenizer.decode(p.tokens) for p in own] for k, own in found.items()}


def test_prompt_sets_split_evenly_with_copying(tokenizer):
    rows = [DataRecord(f"texts:{n}", text=TEXT) for n in range(9)] + [
        chat(n) for n in range(9)
    ]
    found = taken(rows, tokenizer)
    assert {kind: len(own) for kind, own in found.items()} == {
        "chat": 2,
        "text": 2,
        "copying": 2,
    }
    assert TEXT.startswith(found["text"][0])
    assert "Add 1 and 1." in found["chat"][1]
    assert "It is" not in found["chat"][1]
    assert list(taken(rows[9:], tokenizer)) == ["chat", "copying"]


def test_copy_prompts_contain_completion(tokenizer):
    (prompt,) = taken([chat(4)], tokenizer, count=2)["copying"]
    assert prompt.index("It is 5!") < prompt.index(COPY_INSTRUCTION)
    row = DataRecord("pairs:1", prompt="Name a colour.", completion="Blue.")
    (prompt,) = taken([row], tokenizer, count=2)["copying"]
    assert (
        prompt.index("Name a colour.")
        < prompt.index("Blue.")
        < prompt.index(COPY_INSTRUCTION)
    )
    (prompt,) = taken([DataRecord("texts:1", text=TEXT)], tokenizer, count=2)["copying"]
    half = TEXT[: len(TEXT) // 2]
    # The half, and its beginning once more: what follows in it is to be said.
    assert prompt.startswith(half)
    assert half.startswith(prompt[len(half) :].strip("\n"))
    assert 10 < len(prompt) - len(half) < len(half)


def test_copy_prompts_skip_tool_calls(tokenizer):
    turns = ({"role": "user", "content": "Add."}, {"role": "assistant", "content": ""})
    turns[1]["tool_calls"] = [{"function": {"name": "add", "arguments": {}}}]
    assert "copying" not in prompt_sets(
        [DataRecord("tools:1", messages=turns)],
        tokenizer,
        count=2,
        max_prompt_tokens=200,
    )


def test_prompt_sets_skip_long_prompts(tokenizer):
    rows = [
        DataRecord("texts:long", text=TEXT * 9),
        DataRecord("texts:short", text=TEXT),
    ]
    found = prompt_sets(rows, tokenizer, count=4, max_prompt_tokens=60)
    assert {prompt.where for own in found.values() for prompt in own} == {"texts:short"}
    assert not prompt_sets(rows, tokenizer, count=4, max_prompt_tokens=3)
