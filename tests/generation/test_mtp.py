"""The multi-token-prediction head as a proposer: parity of its forward pass, the
positions that it reads, and lossless decoding."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.generation.generator import Generator
from lmx.generation.kv_cache.prefix import PrefixCache
from lmx.generation.kv_cache.sequence import CacheState
from lmx.generation.sampler import Sampler
from lmx.generation.sampling import Sampling
from lmx.generation.speculative.factory import FallbackProposer
from lmx.generation.speculative.mtp import MTPProposer
from lmx.generation.speculative.prompt_lookup import NGramIndex, PromptLookupProposer
from lmx.models.hooks import forward_with_hidden_states
from mlx.utils import tree_flatten
from tiny_generators import byte_tokenizer
from tiny_mtp import EXPERTS, TEXT, WIDTH, tiny_mtp
from tiny_requests import PROMPT, speculative, tokens_of

pytestmark = pytest.mark.fused


def numpy_head(head, embeddings, states):
    """The forward pass in float64, for positions from 0; [L, width] to [L, width]."""
    weights = {k: np.array(v, float) for k, v in tree_flatten(head.parameters())}
    length, dims, rotary = len(states), TEXT["head_dim"], 8

    def norm(name, x):
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + TEXT["rms_norm_eps"])
        return x / scale * weights[f"{name}.weight"]

    def linear(name, x):
        return x @ weights[f"{name}.weight"].T

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    def rotate(x):
        halves = np.arange(rotary // 2)
        angles = np.arange(length)[:, None] * 1e4 ** (-2 * halves / rotary)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b, rest = np.split(x, [rotary // 2, rotary], axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)

    embeddings = norm("pre_fc_norm_embedding", embeddings)
    states = norm("pre_fc_norm_hidden", states)
    x = linear("fc", np.concatenate([embeddings, states], axis=-1))
    layer, y = "layers.0", norm("layers.0.input_layernorm", x)
    attention = f"{layer}.self_attn"
    queries, gate = np.split(
        linear(f"{attention}.q_proj", y).reshape(length, 2, 2 * dims), 2, axis=-1
    )
    keys = linear(f"{attention}.k_proj", y).reshape(length, 1, dims)
    values = linear(f"{attention}.v_proj", y)
    queries = rotate(norm(f"{attention}.q_norm", queries))
    keys = rotate(norm(f"{attention}.k_norm", keys))[:, 0]
    scores = np.einsum("qhd,kd->hqk", queries, keys) / np.sqrt(dims)
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    mixed = np.einsum("hqk,kd->qhd", shares, values) * sigmoid(gate)
    x = x + linear(f"{attention}.o_proj", mixed.reshape(length, -1))
    y = norm(f"{layer}.post_attention_layernorm", x)
    gated = linear(f"{layer}.mlp.gate_proj", y)
    up = linear(f"{layer}.mlp.up_proj", y)
    x = x + linear(f"{layer}.mlp.down_proj", gated * sigmoid(gated) * up)
    return norm("norm", x)


def test_forward_pass_matches_numpy():
    model, head, _ = tiny_mtp(scale=0.2)
    tokens = mx.random.randint(0, 320, (1, 9), key=mx.random.key(0))
    states = mx.random.normal((1, 9, WIDTH), key=mx.random.key(1))
    embeddings = np.array(model.model.embed_tokens(tokens)[0], float)
    expected = numpy_head(head, embeddings, np.array(states[0], float))
    caches = head.make_cache()
    parts = [
        head(tokens[:, start:end], states[:, start:end], caches)
        for start, end in ((0, 4), (4, 5), (5, 9))
    ]
    outputs = np.array(mx.concatenate(parts, axis=1)[0])
    assert np.abs(outputs - expected).max() < 1e-5 * np.abs(expected).max()
    # The control: a normal norm in place of one of another weight.
    head.pre_fc_norm_hidden.weight = mx.ones(WIDTH)
    changed = np.array(head(tokens, states, head.make_cache())[0])
    assert np.abs(changed - expected).max() > 1e-2


def reference_draft(model, head, context, count, *, normalized=True, shift=1):
    """Greedy draft tokens and their logits, computed from the whole context anew.

    Args:
        normalized, shift: other values are errors that a test must find.
    """
    logits, (known, tokens) = [], (len(context) - 1, list(context))
    _, states = forward_with_hidden_states(model, mx.array([context]), head.layer_ids)
    states = states[:, :known]
    states = model.model.norm(states) if normalized else states
    for _ in range(count):
        inputs = [tokens[position + shift] for position in range(states.shape[1])]
        outputs = head(mx.array([inputs]), states, head.make_cache())
        logits.append(head.logits(outputs[:, -1]))
        tokens.append(mx.argmax(logits[-1]).item())
        states = mx.concatenate([states, outputs[:, -1:]], axis=1)
    return tokens[len(context) :], mx.concatenate(logits)


@pytest.fixture(params=["dense", "experts"])
def pair(request):
    changes = EXPERTS if request.param == "experts" else {}
    return tiny_mtp(scale=0.4, **changes)[:2]


def test_head_reads_normalized_states_and_next_tokens(pair, monkeypatch):
    """Also after rounds in which another proposer drafted, and over long prompts."""
    monkeypatch.setattr("lmx.generation.speculative.proposer.STEP_SIZE", 4)
    model, head = pair
    cache = CacheState(model)
    proposer = MTPProposer(head, cache)
    context = list(PROMPT)
    sampler = Sampler(Sampling(), context, TEXT["vocab_size"])
    for grown in (0, 1, 3, 6, 1):
        context += [(7 * len(context) + n) % 320 for n in range(grown)]
        cache.checkpoint()
        cache.forward(mx.array([context[cache.length : -1]]))
        # Rejected tokens, whose states must not be read.
        cache.forward(mx.array([[context[-1], 1, 2]]))
        cache.rollback(3)
        for count in (1, 3):
            drafted = proposer.propose(context, count, sampler).tolist()
            expected, logits = reference_draft(model, head, context, count)
            assert drafted == expected
            for error in ({"normalized": False}, {"shift": 0}):
                wrong = reference_draft(model, head, context, count, **error)[1]
                assert not mx.allclose(wrong, logits, atol=1e-2)


def test_nothing_is_drafted_before_the_first_state():
    model, head, _ = tiny_mtp()
    proposer = MTPProposer(head, CacheState(model))
    sampler = Sampler(Sampling(), [5], TEXT["vocab_size"])
    assert not len(proposer.propose([5], 3, sampler))


@pytest.mark.parametrize(
    ("changes", "lengths"),
    [({}, (1, 4, None)), (EXPERTS, (3,))],
    ids=["plain", "experts"],
)
def test_greedy_decoding_is_lossless(changes, lengths):
    model, head, _ = tiny_mtp(scale=0.4, **changes)
    options = {"max_tokens": 24}
    plain = tokens_of(Generator(model, byte_tokenizer()), PROMPT, **options)
    assert len(set(plain)) > 5
    makers = {
        "mtp": lambda cache: MTPProposer(head, cache),
        "chain": lambda cache: FallbackProposer(
            PromptLookupProposer(NGramIndex()), MTPProposer(head, cache)
        ),
    }
    for maker in makers.values():
        for length in lengths:
            generator = speculative(model, maker, length)
            assert tokens_of(generator, PROMPT, **options) == plain


def test_prefixes_without_hidden_states_are_used(pair):
    model, head = pair
    prefixes = PrefixCache(1 << 30)
    plain = Generator(model, byte_tokenizer(), prefix_cache=prefixes)
    first = tokens_of(plain, PROMPT, max_tokens=5)
    prompt = [*PROMPT, *first, 3, 1, 4]
    generator = speculative(
        model, lambda cache: MTPProposer(head, cache), 3, prefix_cache=prefixes
    )
    expected = tokens_of(Generator(model, byte_tokenizer()), prompt, max_tokens=9)
    assert tokens_of(generator, prompt, max_tokens=9) == expected
    assert generator.speculative_stats.rounds


def copying_pair(mixing):
    """A target and a head that both read little but the last token.

    Args:
        mixing: share of attention and MLP; 0 = the head predicts what the target does.
    """
    model, head, _ = tiny_mtp(scale=0.4)
    for layer in [*model.model.layers, *head.layers]:
        attention = layer.self_attn.o_proj if "self_attn" in layer else None
        for linear in (attention or layer.linear_attn.out_proj, layer.mlp.down_proj):
            linear.weight = mixing * linear.weight
    head.pre_fc_norm_embedding.weight = mx.ones(WIDTH)
    head.norm.weight = model.model.norm.weight
    head.fc.weight = mx.concatenate([mx.eye(WIDTH), mx.zeros((WIDTH, WIDTH))], axis=1)
    return model, head


def test_every_draft_token_of_a_perfect_head_is_accepted():
    model, head = copying_pair(mixing=0.0)
    for length in (1, 4):
        generator = speculative(model, lambda cache: MTPProposer(head, cache), length)
        tokens_of(generator, PROMPT, max_tokens=31)
        stats = generator.speculative_stats
        assert stats.acceptance_rate_by_position == [1.0] * length
        assert stats.rounds == 30 // (length + 1)


def test_sampled_drafts_have_the_noise_of_the_request():
    """A perfect head drafts what the target samples, at any temperature."""
    model, head = copying_pair(mixing=0.0)
    for seed in range(3):
        sampling = Sampling(temperature=2.0, top_p=0.9, seed=seed)
        plain = tokens_of(
            Generator(model, byte_tokenizer()), max_tokens=31, sampling=sampling
        )
        generator = speculative(model, lambda cache: MTPProposer(head, cache), 4)
        assert tokens_of(generator, max_tokens=31, sampling=sampling) == plain
        assert generator.speculative_stats.acceptance_rate == 1
    assert len(set(plain)) > 5
