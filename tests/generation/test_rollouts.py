"""Rollouts: each completion is a sample of its prompt, with its log-probabilities."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.generation.rollouts import sample_completions
from processes import in_turn
from test_kv_cache import tiny as family
from tiny_generators import tiny

pytestmark = pytest.mark.fused

DRAW = np.random.default_rng(0)
PROMPTS = [DRAW.integers(1, 64, n).tolist() for n in (1, 5, 12, 5)]


def sample(model, prompts=PROMPTS, **changes):
    options = {
        "num_generations": 3,
        "max_tokens": 10,
        "temperature": 0.8,
        "stop_tokens": frozenset(range(0, 250, 9)),
        "seed": 1,
    }
    return sample_completions(model, prompts, **options | changes)


def logps_of(model, prompt, completion, temperature):
    """Log-probabilities from one forward pass over everything."""
    tokens = mx.array([[*prompt, *completion.tokens]])
    logits = model(tokens[:, :-1])[0].astype(mx.float32) / temperature
    logps = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logps, tokens[0, 1:, None], axis=-1)[:, 0]
    return np.array(chosen)[len(prompt) - 1 :]


@pytest.mark.parametrize(
    ("name", "temperature"), [("llama", 1.0), ("gemma3", 0.8), ("qwen3_next", 0.8)]
)
def test_log_probabilities_equal_those_of_a_forward_pass(name, temperature):
    model = family(name) if name == "qwen3_next" else tiny(name)
    groups = sample(model, temperature=temperature)
    assert [len(group) for group in groups] == [3] * len(PROMPTS)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            expected = logps_of(model, prompt, completion, temperature)
            np.testing.assert_allclose(completion.logps, expected, atol=1e-4)


@pytest.mark.parametrize(("size", "is_wrong"), [(3, False), (2, True)])
def test_ranks_sample_the_completions_of_one_process(size, is_wrong):
    """A sample has the seed of its place among all, whoever draws it."""
    model, prompts = tiny("llama"), [*PROMPTS, *PROMPTS[:2]]
    one = sample(model, prompts)
    shared = in_turn(
        lambda ranks: sample(model, prompts, ranks=ranks), size, is_wrong=is_wrong
    )
    pairs = [
        (ours, theirs)
        for groups in zip(shared, one, strict=True)
        for ours, theirs in zip(*groups, strict=True)
    ]
    is_same = all(a.tokens == b.tokens for a, b in pairs)
    assert is_same != is_wrong
    for ours, theirs in pairs if is_same else ():
        np.testing.assert_allclose(ours.logps, theirs.logps, atol=1e-4)
        assert ours.is_finished == theirs.is_finished


def test_completion_ends_with_the_first_stop_token():
    stop = frozenset(range(0, 250, 9))
    completions = [c for group in sample(tiny("llama")) for c in group]
    for completion in completions:
        assert not stop & set(completion.tokens[:-1])
        assert completion.is_finished == (completion.tokens[-1] in stop)
        assert completion.is_finished or len(completion.tokens) == 10
    assert {c.is_finished for c in completions} == {True, False}


def test_seed_determines_the_completions():
    model = tiny("llama")
    first, same, other = (sample(model, seed=seed) for seed in (1, 1, 2))
    assert first == same
    assert first != other
    assert first[0][0].tokens != first[0][1].tokens


def test_first_tokens_have_the_models_distribution():
    model, count, temperature = tiny("llama"), 4000, 0.6
    [group] = sample(
        model,
        [PROMPTS[1]],
        num_generations=count,
        max_tokens=1,
        temperature=temperature,
    )
    logits = model(mx.array([PROMPTS[1]]))[0, -1].astype(mx.float32)
    drawn = np.bincount([c.tokens[0] for c in group], minlength=logits.size)

    def chi_square(temperature):
        expected = count * np.array(mx.softmax(logits / temperature))
        usual = expected >= 5
        observed = [*drawn[usual], drawn[~usual].sum()]
        wanted = [*expected[usual], max(expected[~usual].sum(), 1e-9)]
        terms = [(o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True)]
        return sum(terms), len(terms) - 1

    value, degrees = chi_square(temperature)
    assert value < degrees + 5 * (2 * degrees) ** 0.5
    # The control: another temperature's distribution fails the same test.
    value, degrees = chi_square(1.0)
    assert value > degrees + 5 * (2 * degrees) ** 0.5
