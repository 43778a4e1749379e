"""Chains of thought: their budget, and grammars that begin after them."""

import re
from random import Random

import numpy as np
import pytest
from lmx.errors import UserError
from lmx.generation.engine import Engine
from lmx.generation.generator import Generator
from lmx.generation.grammar import Grammar
from lmx.generation.grammar_matcher import GrammarCompiler, allows
from lmx.generation.sampling import Sampling
from lmx.generation.sequence import GenerationRequest
from lmx.generation.speculative.draft_length import DraftLengthController
from lmx.generation.speculative.prompt_lookup import NGramIndex, PromptLookupProposer
from lmx.generation.thinking import Thinking, required_thinking, thinking_of
from tiny_generators import VOCABULARY, byte_tokenizer, thinking_tokenizer, tiny
from tiny_requests import run

TOKENIZER = thinking_tokenizer()
START, END = 258, 259
(STOP,) = TOKENIZER.eos_token_ids
(NEWLINE,) = TOKENIZER.encode("\n")
EXPRESSION = "(ab|c[0-9]{2}){1,3}!"
WORDS = Grammar("regex", EXPRESSION)
ANSWER = GrammarCompiler(TOKENIZER).compile(WORDS)
EXIT = 256
OPEN = GrammarCompiler(TOKENIZER).compile(Grammar("regex", EXPRESSION, EXIT))
THINKING = Thinking((END,), (START,), None, (NEWLINE, END), (NEWLINE,))


def matcher(thinking, answer=ANSWER):
    return thinking.begin(answer and answer.start({STOP}), {STOP})


def allowed(mask):
    return {token for token in range(VOCABULARY) if allows(mask, token)}


def test_the_grammar_begins_after_the_chain_of_thought():
    state = matcher(THINKING)
    first = {ord("a"), ord("c")}
    tokens = {chr(t): TOKENIZER.encode(chr(t))[0] for t in first}
    first = {*tokens.values()}
    assert allowed(state.masks([], VOCABULARY)[0]) == first | {START}
    state.advance(START)
    everything = {*range(VOCABULARY)}
    assert allowed(state.masks([], VOCABULARY)[0]) == everything - {STOP}
    for token in TOKENIZER.encode("ab! or not"):
        state.advance(token)
    state.advance(END)
    assert allowed(state.masks([], VOCABULARY)[0]) == first | {NEWLINE}
    for _ in range(2):
        state.advance(NEWLINE)
    assert allowed(state.masks([], VOCABULARY)[0]) == first
    for token in TOKENIZER.encode("ab!"):
        assert state.advance(token) is None
    assert allowed(state.masks([], VOCABULARY)[0]) == {STOP}
    # Without a chain of thought.
    state = matcher(THINKING)
    state.advance(tokens["a"])
    assert allowed(state.masks([], VOCABULARY)[0]) == {TOKENIZER.encode("b")[0]}


def test_a_budget_closes_the_chain_of_thought():
    state = matcher(Thinking((END,), (), 3, (NEWLINE, END), (NEWLINE,)))
    for token in (START, 5, 6):
        assert len(allowed(state.masks([], VOCABULARY)[0])) == VOCABULARY - 1
        state.advance(token)
    for token in (NEWLINE, END):
        assert allowed(state.masks([], VOCABULARY)[0]) == {token}
        state.advance(token)
    assert NEWLINE in allowed(state.masks([], VOCABULARY)[0])
    assert not state.is_free
    # Without a grammar, the rest is free.
    state = matcher(Thinking((END,), (), 0, (END,)), None)
    assert allowed(state.masks([], VOCABULARY)[0]) == {END}
    state.advance(END)
    assert state.is_free


@pytest.mark.parametrize("thinking", [THINKING, Thinking((7, END), (), 4, (7, END))])
@pytest.mark.parametrize("answer", [ANSWER, OPEN, None])
def test_masks_along_a_draft_are_those_of_its_tokens_one_by_one(thinking, answer):
    random = Random(1)
    seen = 0
    for _ in range(60):
        state, draft = matcher(thinking, answer), []
        expected = [state.masks([], VOCABULARY)[0]]
        for _ in range(12):
            some = [*allowed(expected[-1]) & {START, END, EXIT, NEWLINE, 7, 66}]
            token = random.choice([*some, *allowed(expected[-1])])
            draft.append(token)
            if random.random() < 0.03:
                draft[-1] = random.randrange(VOCABULARY)
            if not allows(expected[-1], draft[-1]):
                break
            state.advance(draft[-1])
            expected.append(state.masks([], VOCABULARY)[0])
            if draft[-1] == STOP:
                break
        masks = matcher(thinking, answer).masks(draft, VOCABULARY)
        if STOP in draft:
            expected = expected[: draft.index(STOP) + 1]
        assert np.array_equal(masks[: len(expected)], np.stack(expected))
        seen += len(expected)
    assert seen > 300


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("answer", [ANSWER, OPEN, None])
def test_completions_think_within_their_budget_then_match(drafts, answer):
    options = {}
    if drafts:
        index = NGramIndex()
        options["make_proposer"] = lambda _: PromptLookupProposer(index)
        options["draft_length"] = DraftLengthController(fixed=3)
    thinking = Thinking((END,), (), 9, (NEWLINE, END), (NEWLINE,))
    requests = [
        GenerationRequest(
            [n + 1, 5, 6, 7, 5, 6],
            60,
            Sampling(temperature=1.0, seed=n, logit_bias=((EXIT, 3.0 * (n % 3)),)),
            frozenset({STOP}),
            grammar=answer,
            thinking=thinking if n % 4 else None,
        )
        for n in range(12)
    ]
    found = run(Engine(tiny("llama"), **options), requests)
    exits = 0
    for request, tokens in zip(requests, found, strict=True):
        end = tokens.index(END) if request.thinking else -1
        assert end <= 10
        rest = TOKENIZER.decode([t for t in tokens[end + 1 :] if t != STOP]).lstrip()
        if answer is OPEN and rest.startswith("<|im_start|>"):
            exits += not re.search(EXPRESSION, rest)
        else:
            assert not answer or re.fullmatch(EXPRESSION, rest)
    assert (0 < exits < len(found)) == (answer is OPEN)
    plain = run(Engine(tiny("llama")), requests)
    assert found == plain


def test_which_requests_think():
    begun = [1, START, NEWLINE]
    assert required_thinking(TOKENIZER, begun) is None
    assert required_thinking(TOKENIZER, [1, 2], grammar=WORDS) is None
    found = required_thinking(TOKENIZER, begun, grammar=WORDS)
    assert found == Thinking((END,), (), None, (NEWLINE, END), (NEWLINE,))
    assert thinking_of(TOKENIZER, [1, 2], 5).start == (START,)
    other = byte_tokenizer()
    assert required_thinking(other, begun, grammar=WORDS) is None
    with pytest.raises(UserError, match="no chain of thought"):
        required_thinking(other, begun, 5)
    generator = Generator(tiny("llama"), TOKENIZER)
    result = generator.generate(begun, max_tokens=40, thinking_budget=4)
    assert result.tokens.index(END) <= 5
