"""Speculative decoding does not change the output: all kinds of cache, proposers,
penalties, stops and draft lengths."""

import math
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from lmx.errors import UserError
from lmx.generation.batching import BatchGenerator, GenerationRequest
from lmx.generation.generator import Generator
from lmx.generation.kv_cache.prefix import PrefixCache
from lmx.generation.sampling import Sampling
from lmx.generation.speculative.draft_length import DraftLengthController
from lmx.generation.speculative.draft_model import DraftModelProposer
from lmx.generation.speculative.factory import FallbackProposer
from lmx.generation.speculative.prompt_lookup import NGramIndex, PromptLookupProposer
from lmx.generation.speculative.proposer import DraftTokens
from mlx.utils import tree_map
from test_kv_cache import tiny as family_model
from test_rejection_sampling import chi_square_ratio, distributions
from tiny_families import VOCABULARY, WINDOW
from tiny_generators import byte_tokenizer

# Proposers only see tokens, so only the first family is tested with all of them.
FAMILIES = {
    "llama": ("draft", "lookup", "chain"),
    "qwen3": ("draft",),
    "gemma3": ("lookup",),
    "qwen3_next": ("chain",),
    "falcon_h1": ("draft",),
    "deepseek_v3": ("lookup",),
}
LONG = 5 * WINDOW
PROMPT = [5, 9, 11, 5, 9, 2, 7, 5, 9]
SETTINGS = {
    "plain": Sampling(),
    "repetition": Sampling(repetition_penalty=1.3),
    "presence": Sampling(presence_penalty=0.4),
    "frequency": Sampling(frequency_penalty=0.3),
    "bias": Sampling(logit_bias=((5, 20.0), (7, -9.0))),
}


def sharpened(family, seed=0, **changes):
    """Random weights, scaled up so that the next token varies."""
    model = family_model(family, **changes)
    mx.random.seed(seed + 1)
    noisy_parameters = tree_map(
        lambda w: w + 0.25 * mx.random.normal(w.shape).astype(w.dtype),
        model.parameters(),
    )
    model.update(noisy_parameters)
    mx.eval(model.parameters())
    return model


class Noisy:
    """Drafts the correct tokens, except for every third."""

    def __init__(self, expected_tokens):
        self.right = expected_tokens

    def propose(self, context, count, sampler):
        draft_tokens = list(self.right[len(context) : len(context) + count])
        for position, _ in enumerate(draft_tokens):
            if (len(context) + position) % 3 == 2:
                draft_tokens[position] = (draft_tokens[position] + 1) % VOCABULARY
        return DraftTokens(mx.array(draft_tokens, mx.int32))


def broken(**changes):
    """A model with one weight that is NaN, as after a diverged training."""
    model = sharpened("llama", **changes)
    model.model.norm.weight[0] = float("nan")
    return model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_predictions_that_are_nan_are_refused(temperature):
    sampling = Sampling(temperature=temperature)
    index = NGramIndex()

    def speculative(model, proposer):
        return Generator(
            model,
            byte_tokenizer(),
            make_proposer=lambda _: proposer,
            draft_length=DraftLengthController(fixed=3),
        )

    good, bad = sharpened("llama"), broken()
    draft = speculative(good, DraftModelProposer(bad))
    with pytest.raises(UserError, match="the draft model's predictions are NaN"):
        tokens_of(draft, sampling=sampling)
    lookup = speculative(bad, PromptLookupProposer(index))
    for generator in (lookup, Generator(bad, byte_tokenizer())):
        with pytest.raises(UserError, match="the model's predictions are NaN"):
            tokens_of(generator, sampling=sampling)
    with pytest.raises(UserError, match="the model's predictions are NaN"):
        BatchGenerator(bad)
    batcher = BatchGenerator(good)
    batcher.model = bad  # NaN for these prompts only
    batcher.submit(GenerationRequest(PROMPT, sampling=sampling))
    with pytest.raises(UserError, match="the model's predictions are NaN"):
        batcher.step()


def tokens_of(generator, prompt=PROMPT, **options):
    options = {"max_tokens": LONG, "stop_tokens": ()} | options
    return generator.generate(prompt, **options).tokens


def speculative(model, propose, length=None, **options):
    controller = DraftLengthController(max_draft_tokens=8, fixed=length)
    return Generator(
        model,
        byte_tokenizer(),
        make_proposer=propose,
        draft_length=controller,
        **options,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_speculative_greedy_matches_plain_decoding(family):
    model, draft = sharpened(family), sharpened("llama", seed=1)
    plain = tokens_of(Generator(model, byte_tokenizer()))
    assert len(plain) > 4 * WINDOW
    assert len(set(plain)) > 5
    proposers = {
        "draft": lambda _: DraftModelProposer(draft),
        "itself": lambda _: DraftModelProposer(model),
        "noisy": lambda _: Noisy(PROMPT + plain),
        "lookup": lambda _: PromptLookupProposer(NGramIndex(ngram_size=1)),
        "chain": lambda _: FallbackProposer(
            PromptLookupProposer(NGramIndex(ngram_size=2)), DraftModelProposer(draft)
        ),
    }
    for name in ("itself", "noisy", *FAMILIES[family]):
        # At most two of the noisy draft tokens are accepted. Seven draft tokens and the
        # token before them fill the window.
        for length in (0, 1, 2, 3, 4, 7, 8) if name == "noisy" else (None, 3):
            generator = speculative(model, proposers[name], length)
            assert tokens_of(generator) == plain, (name, length)


def test_speculative_greedy_matches_with_kv_bits_by_layer():
    model = sharpened("llama", head_dim=32, num_hidden_layers=3)
    options = {"kv_bits": [8, 16, 2]}
    plain = tokens_of(Generator(model, byte_tokenizer(), **options))
    assert plain != tokens_of(Generator(model, byte_tokenizer()))
    for length in (1, 3):
        generator = speculative(
            model, lambda _: Noisy(PROMPT + plain), length, **options
        )
        assert tokens_of(generator) == plain
        assert generator.speculative_stats.acceptance_rate < 1


def test_mlx_lm_differs_past_the_window():
    """Control: mlx-lm checks only once, at the start, that its cache can be trimmed."""
    from mlx_lm.generate import speculative_generate_step

    model, draft = sharpened("gemma3"), sharpened("llama", seed=1)
    plain = tokens_of(Generator(model, byte_tokenizer()))
    steps = speculative_generate_step(
        mx.array(PROMPT), model, draft, num_draft_tokens=3, max_tokens=LONG
    )
    assert [int(token) for token, *_ in steps] != plain


@pytest.mark.parametrize("name", SETTINGS)
def test_speculative_decoding_applies_penalties_exactly(name):
    model, draft = sharpened("llama"), sharpened("llama", seed=1)
    options = {"sampling": SETTINGS[name], "max_tokens": 3 * WINDOW}
    plain = tokens_of(Generator(model, byte_tokenizer()), **options)
    for propose in (
        lambda _: DraftModelProposer(draft),
        lambda _: Noisy(PROMPT + plain),
    ):
        for length in (1, 4, None):
            generator = speculative(model, propose, length)
            assert tokens_of(generator, **options) == plain
    options.pop("sampling")
    unchanged = tokens_of(Generator(model, byte_tokenizer()), **options)
    assert (plain == unchanged) == (name == "plain")


@pytest.mark.parametrize("length", [1, 3, 4, 8])
def test_self_draft_needs_fewest_forward_passes(length):
    model, calls = sharpened("llama"), []

    class Recorder:
        layers, args = model.layers, model.args

        def __call__(self, tokens, cache=None):
            calls.append(tokens.shape[1])
            return model(tokens, cache=cache)

    generator = speculative(Recorder(), lambda _: DraftModelProposer(model), length)
    plain = tokens_of(Generator(model, byte_tokenizer()), max_tokens=41)
    assert tokens_of(generator, max_tokens=41) == plain
    # Two passes for the prompt, then rounds for forty tokens.
    assert len(calls) - 2 == math.ceil(40 / (length + 1))
    assert generator.speculative_stats.acceptance_rate == 1
    assert generator.speculative_stats.acceptance_rate_by_position == [1.0] * length


def test_stops_and_limits_inside_accepted_tokens():
    model = sharpened("llama")
    plain_generator = Generator(model, byte_tokenizer())
    plain = tokens_of(plain_generator)
    text = plain_generator.generate(PROMPT, max_tokens=LONG, stop_tokens=()).text

    @cache
    def stopped_at(token):
        options = {"max_tokens": LONG, "stop_tokens": (token,)}
        return plain_generator.generate(PROMPT, **options)

    for length in (3, 8):
        generator = speculative(model, lambda _: DraftModelProposer(model), length)
        # Every position in two rounds.
        for limit in range(1, 2 * (length + 1) + 2):
            assert tokens_of(generator, max_tokens=limit) == plain[:limit]
        for end in range(3, 15):
            options = {"stop_tokens": (plain[end],)}
            expected = stopped_at(plain[end])
            result = generator.generate(PROMPT, max_tokens=LONG, **options)
            assert result.tokens == expected.tokens
            assert result.finish_reason == "stop"
        options = {"stop": [text[9:11]], "stop_tokens": ()}
        expected = plain_generator.generate(PROMPT, max_tokens=LONG, **options)
        assert (
            generator.generate(PROMPT, max_tokens=LONG, **options).text == expected.text
        )


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_prefix_cache_after_speculative_decoding_is_exact(family):
    model = sharpened(family)
    plain = Generator(model, byte_tokenizer())
    completions = tokens_of(plain)

    @cache
    def generate_alone(*prompt):
        return tokens_of(plain, prompt, max_tokens=9)

    for length in (1, 4, 8):
        prefixes = PrefixCache(1 << 30)
        generator = speculative(
            model, lambda _: Noisy(PROMPT + completions), length, prefix_cache=prefixes
        )
        for limit in (1, 2, 3, 4, 5, 9, 20):
            first = tokens_of(generator, max_tokens=limit)
            stream = generator.stream(PROMPT, max_tokens=40, stop_tokens=())
            for _ in range(limit):
                next(stream)
            stream.close()
            second = [*PROMPT, *first, 3, 1, 4]
            assert tokens_of(generator, second, max_tokens=9) == generate_alone(*second)


class Table:
    """A model that looks up its logits in a table of `distributions`."""

    layers, args = (), None

    def __init__(self, table):
        self.law = table

    def make_cache(self):
        return [TokenCache()]

    def __call__(self, tokens, cache):
        read = cache[0]
        logits = []
        for token in tokens[0].tolist():
            read.tokens.append(token)
            index = [*read.tokens[1:], 0, 0, 0, 0][:4]
            logits.append(self.law[tuple(index)])
        read.offset = len(read.tokens)
        return mx.stack(logits)[None]


class TokenCache:
    """A cache of tokens in position of keys and values."""

    nbytes = 0

    def __init__(self):
        self.tokens, self.offset = [], 0

    def update_and_fetch(self):
        """Marks the cache as attention."""

    def trim(self, count):
        del self.tokens[len(self.tokens) - count :]
        self.offset -= count
        return count

    def empty(self):
        return True

    @property
    def state(self):
        return ()


def test_speculative_sampling_keeps_distribution():
    """Through the whole generator, with adaptive draft lengths."""
    count, tokenizer = 2000, byte_tokenizer()
    target, draft = distributions(Sampling(temperature=1.0))
    controller = DraftLengthController(max_draft_tokens=3)
    completions = np.zeros((count, 3), int)
    for seed in range(count):
        generator = Generator(
            Table(target),
            tokenizer,
            make_proposer=lambda _, seed=seed: DraftModelProposer(
                Table(draft), seed=seed
            ),
            draft_length=controller,
        )
        options = {"max_tokens": 3, "stop_tokens": ()}
        sampling = Sampling(temperature=1.0, seed=seed)
        completions[seed] = generator.generate([0], sampling=sampling, **options).tokens
    assert chi_square_ratio(completions, Sampling(temperature=1.0)) < 1
    assert controller.rounds
