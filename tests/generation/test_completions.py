"""A model's own answers in place of those of the rows."""

import numpy as np
import pytest
from lmx.data.batching import InMemoryExamples
from lmx.data.tokenization import Example
from lmx.errors import UserError
from lmx.generation import completions
from lmx.generation.completions import (
    CachedGenerator,
    prompt_tokens,
    replace_completions,
)
from lmx.generation.engine import Generator
from tiny_generators import VOCABULARY, byte_tokenizer, tiny

ENDS = frozenset(range(40))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("LMX_CACHE", str(tmp_path))


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


def example(length, asked, seed):
    tokens = np.random.default_rng(seed).integers(40, VOCABULARY, length)
    return Example(tokens.astype(np.int32), np.arange(length) >= asked, f"row {seed}")


ROWS = InMemoryExamples(example(6 + n, 2 + n, n) for n in range(5))


class Asked:
    """Loads the model, and counts how often."""

    def __init__(self, model, stop_at=None):
        self.model, self.times, self.stop_at = model, 0, stop_at

    def __call__(self):
        self.times += 1
        if self.times == self.stop_at:
            raise KeyboardInterrupt
        return self.model


def answers(load, *, temperatures=(0.0,), max_seq_length=30, seed=0, digest="a"):
    answerer = CachedGenerator(load, digest, ENDS, lambda _: None, lambda _: None)
    settings = {"max_tokens": 9, "max_seq_length": max_seq_length, "seed": seed}
    return replace_completions(ROWS, answerer, temperatures=temperatures, **settings)


def test_replace_completions_matches_generator(model):
    generator = Generator(model, byte_tokenizer())
    found = answers(Asked(model))
    assert len(found) == len(ROWS)
    lengths = set()
    for row, own in zip(ROWS, found, strict=True):
        prompt = prompt_tokens(row)
        assert own.tokens[: len(prompt)].tolist() == prompt
        assert own.mask.tolist() == [False] * len(prompt) + [True] * (
            len(own.tokens) - len(prompt)
        )
        said = generator.generate(prompt, max_tokens=9, stop_tokens=ENDS)
        answer = own.tokens[len(prompt) :].tolist()
        assert answer[: len(said.tokens)] == said.tokens
        # What ends an answer is learned too.
        assert (len(answer) > len(said.tokens)) == (answer[-1] in ENDS)
        assert own.where == row.where
        lengths.add(len(answer))
    assert len(lengths) > 1


def test_prompt_tokens_end_before_last_completion():
    tokens = np.arange(8, dtype=np.int32)
    turns = np.array([0, 0, 1, 1, 0, 0, 1, 1], bool)
    assert prompt_tokens(Example(tokens, turns, "")) == [0, 1, 2, 3, 4, 5]
    text = np.arange(8) > 0
    assert prompt_tokens(Example(tokens, text, "")) == [0]


def test_replace_completions_samples_every_temperature_reproducibly(model):
    found = answers(Asked(model), temperatures=(0.0, 1.0, 1.0))
    texts = [row.tokens.tolist() for row in found]
    assert len(found) == 3 * len(ROWS)
    assert texts[::3] == [row.tokens.tolist() for row in answers(Asked(model))]
    assert texts[1::3] != texts[2::3]
    again = answers(Asked(model), temperatures=(0.0, 1.0, 1.0), digest="b")
    assert texts == [row.tokens.tolist() for row in again]
    other = answers(Asked(model), temperatures=(0.0, 1.0, 1.0), seed=1)
    assert texts != [row.tokens.tolist() for row in other]


def test_completions_are_cached_and_resume(model, monkeypatch):
    monkeypatch.setattr(completions, "BATCH_SIZE", 2)
    with pytest.raises(KeyboardInterrupt):
        answers(Asked(model, stop_at=2))
    second, third, other = Asked(model), Asked(model), Asked(model)
    found = [row.tokens.tolist() for row in answers(second)]
    assert found == [row.tokens.tolist() for row in answers(third)]
    answers(other, digest="another model")
    assert (second.times, third.times, other.times) == (2, 0, 3)


def test_replace_completions_skips_prompts_without_room(model):
    assert len(answers(Asked(model), max_seq_length=4)) == 2
    assert all(len(r.tokens) <= 4 for r in answers(Asked(model), max_seq_length=4))
    with pytest.raises(UserError, match="leaves room"):
        answers(Asked(model), max_seq_length=2)
