"""Completions of a model in place of those of the dataset."""

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
from lmx.generation.generator import Generator
from lmx.interfaces import Logger
from lmx.run.logger import RunLogger
from tiny_generators import VOCABULARY, byte_tokenizer, tiny

STOP_TOKENS = frozenset(range(40))


@pytest.fixture(autouse=True)
def temporary_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LMX_CACHE", str(tmp_path))


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


def example(length, prompt_length, seed):
    tokens = np.random.default_rng(seed).integers(40, VOCABULARY, length)
    return Example(
        tokens.astype(np.int32), np.arange(length) >= prompt_length, f"row {seed}"
    )


def test_no_two_requests_share_noise():
    """32 bits are too few: of 100,000 requests, two had the same with p = .7."""
    source = CachedGenerator(None, "x", STOP_TOKENS, Logger())
    entropies = [(0, index, sample) for index in range(200) for sample in (0, 1)]
    seeds = {source.request([5], 1, 1.0, each).sampling.seed for each in entropies}
    assert len(seeds) == len(entropies)
    assert max(seeds) > 1 << 63


EXAMPLES = InMemoryExamples(example(6 + n, 2 + n, n) for n in range(5))


class CountingLoader:
    """Returns the model and counts the calls."""

    def __init__(self, model, stop_at=None):
        self.model, self.times, self.stop_at = model, 0, stop_at

    def __call__(self):
        self.times += 1
        if self.times == self.stop_at:
            raise KeyboardInterrupt
        return self.model


def replaced(
    load,
    *,
    temperatures=(0.0,),
    max_seq_length=30,
    seed=0,
    digest="a",
    logger=None,
):
    cached_generator = CachedGenerator(load, digest, STOP_TOKENS, logger or Logger())
    settings = {"max_tokens": 9, "max_seq_length": max_seq_length, "seed": seed}
    return replace_completions(
        EXAMPLES, cached_generator, temperatures=temperatures, **settings
    )


def test_replace_completions_matches_generator(model):
    generator = Generator(model, byte_tokenizer())
    examples = replaced(CountingLoader(model))
    assert len(examples) == len(EXAMPLES)
    lengths = set()
    for example, replacement in zip(EXAMPLES, examples, strict=True):
        prompt = prompt_tokens(example)
        assert replacement.tokens[: len(prompt)].tolist() == prompt
        assert replacement.mask.tolist() == [False] * len(prompt) + [True] * (
            len(replacement.tokens) - len(prompt)
        )
        result = generator.generate(prompt, max_tokens=9, stop_tokens=STOP_TOKENS)
        completion = replacement.tokens[len(prompt) :].tolist()
        assert completion[: len(result.tokens)] == result.tokens
        # The stop token is trainable, too.
        assert (len(completion) > len(result.tokens)) == (completion[-1] in STOP_TOKENS)
        assert replacement.where == example.where
        lengths.add(len(completion))
    assert len(lengths) > 1


def test_prompt_tokens_end_before_last_completion():
    tokens = np.arange(8, dtype=np.int32)
    turns = np.array([0, 0, 1, 1, 0, 0, 1, 1], bool)
    assert prompt_tokens(Example(tokens, turns, "")) == [0, 1, 2, 3, 4, 5]
    text = np.arange(8) > 0
    assert prompt_tokens(Example(tokens, text, "")) == [0]


def test_replace_completions_samples_every_temperature_reproducibly(model):
    examples = replaced(CountingLoader(model), temperatures=(0.0, 1.0, 1.0))
    texts = [example.tokens.tolist() for example in examples]
    assert len(examples) == 3 * len(EXAMPLES)
    assert texts[::3] == [
        example.tokens.tolist() for example in replaced(CountingLoader(model))
    ]
    assert texts[1::3] != texts[2::3]
    again = replaced(CountingLoader(model), temperatures=(0.0, 1.0, 1.0), digest="b")
    assert texts == [example.tokens.tolist() for example in again]
    other = replaced(CountingLoader(model), temperatures=(0.0, 1.0, 1.0), seed=1)
    assert texts != [example.tokens.tolist() for example in other]


def test_completions_are_cached_and_resume(model, monkeypatch):
    monkeypatch.setattr(completions, "BATCH_SIZE", 2)
    with pytest.raises(KeyboardInterrupt):
        replaced(CountingLoader(model, stop_at=2))
    second, third, other = (
        CountingLoader(model),
        CountingLoader(model),
        CountingLoader(model),
    )
    examples = [example.tokens.tolist() for example in replaced(second)]
    assert examples == [example.tokens.tolist() for example in replaced(third)]
    replaced(other, digest="another model")
    assert (second.times, third.times, other.times) == (2, 0, 3)


def test_replace_completions_skips_prompts_without_room(model):
    assert len(replaced(CountingLoader(model), max_seq_length=4)) == 2
    assert all(
        len(r.tokens) <= 4 for r in replaced(CountingLoader(model), max_seq_length=4)
    )
    with pytest.raises(UserError, match="leaves room"):
        replaced(CountingLoader(model), max_seq_length=2)


def test_progress_counts_all_tokens(model, monkeypatch):
    """Also those after a stop token, and those of cached completions."""
    logger, lines = RunLogger(None, quiet=True), []
    monkeypatch.setattr(logger, "close_progress", lambda bar: lines.append(bar.line()))
    replaced(CountingLoader(model), logger=logger)
    replaced(CountingLoader(model), logger=logger)
    assert [line.split("  ")[0] for line in lines] == ["completions 100%"] * 2
