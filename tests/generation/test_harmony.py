"""Harmony: budgets of the analysis, and grammars of the final message."""

from random import Random

import pytest
from lmx.generation.grammar import Grammar
from lmx.generation.grammar_matcher import GrammarCompiler, allows
from lmx.generation.harmony import ANALYSIS, FINAL, is_harmony
from lmx.generation.thinking import required_thinking, thinking_of
from tiny_generators import byte_tokenizer, harmony_tokenizer

TOKENIZER = harmony_tokenizer()
SIZE = len(TOKENIZER)
(STOP,) = TOKENIZER.eos_token_ids
ANSWER = Grammar("regex", "(yes|no)!")
COMPILED = GrammarCompiler(TOKENIZER).compile(ANSWER)


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def completion(thinking, answer, seed, bias=""):
    """Random tokens that are allowed, first those of `bias`."""
    state = thinking.begin(answer and answer.start({STOP}), {STOP})
    random, wanted, tokens = Random(seed), encode(bias), []
    while not tokens or (tokens[-1] != STOP and len(tokens) < 90):
        (mask,) = state.masks([], SIZE)
        allowed = [token for token in range(SIZE) if allows(mask, token)]
        first = wanted.pop(0) if wanted else None
        tokens.append(first if first in allowed else random.choice(allowed))
        assert state.advance(tokens[-1]) is None
        if state.is_free:
            break
    return tokens


@pytest.mark.parametrize("budget", [0, 1, 20])
def test_a_grammar_is_that_of_the_final_message(budget):
    thinking = thinking_of(TOKENIZER, [1], budget, grammar=ANSWER)
    head = encode(ANALYSIS) if budget else []
    closing = encode("<|end|><|start|>assistant") if budget else []
    for seed in range(20):
        tokens = completion(thinking, COMPILED, seed, ANALYSIS if budget else "")
        # The header of the analysis is not counted.
        rest = tokens[len(head) + budget :]
        assert tokens[: len(head)] == head
        texts = [f"{FINAL}{answer}!<|im_end|>" for answer in ("yes", "no")]
        assert rest in [closing + encode(text) for text in texts]


def test_a_final_message_with_a_format_in_its_header():
    """gpt-oss writes it so where JSON is wanted."""
    thinking = thinking_of(TOKENIZER, [1], grammar=ANSWER)
    head = "<|channel|>final <|constrain|>json<|message|>"
    tokens = completion(thinking, COMPILED, 1, head)
    assert TOKENIZER.decode(tokens).startswith(FINAL)


def test_a_budget_ends_the_analysis_alone():
    thinking = thinking_of(TOKENIZER, [1], 5)
    tokens = completion(thinking, None, 1, ANALYSIS + "a long thought")
    assert tokens == encode(f"{ANALYSIS}a lon<|end|>")
    # Another message is free.
    for text in (FINAL, "<|channel|>commentary", "<|start|>"):
        tokens = completion(thinking, None, 1, text)
        assert encode(text)[: len(tokens)] == tokens


def test_which_requests_have_channels():
    assert is_harmony(TOKENIZER)
    assert not is_harmony(byte_tokenizer())
    assert required_thinking(TOKENIZER, [1]) is None
    expected = thinking_of(TOKENIZER, [1], grammar=ANSWER)
    assert required_thinking(TOKENIZER, [1], grammar=ANSWER) == expected
