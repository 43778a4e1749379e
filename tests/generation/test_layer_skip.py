"""Self-speculative decoding with skipped layers."""

import mlx.core as mx
import pytest
from lmx.errors import UserError
from lmx.generation.generator import Generator
from lmx.generation.speculative import layer_skip
from lmx.generation.speculative.draft_model import DraftModelProposer
from lmx.generation.speculative.layer_skip import (
    choose_skipped_layers,
    skip_layers,
)
from test_kv_cache import random_tokens, tiny
from tiny_generators import byte_tokenizer
from tiny_requests import PROMPT, sharpened, speculative, tokens_of


@pytest.mark.parametrize("family", ["llama", "qwen3", "falcon_h1"])
def test_layer_skip_keeps_output_and_shares_weights(family):
    model = sharpened(family)
    generator = speculative(
        model, lambda _: DraftModelProposer(skip_layers(model, [1])), 3
    )
    plain = tokens_of(Generator(model, byte_tokenizer()))
    assert tokens_of(generator) == plain
    assert len(model.layers) == 2
    assert skip_layers(model, [1]).layers[0] is model.layers[0]


def test_skip_layers_matches_smaller_model():
    model = tiny("llama", num_hidden_layers=3)
    smaller = tiny("llama", num_hidden_layers=2)
    for path in ("embed_tokens", "norm"):
        smaller.model[path] = model.model[path]
    smaller.model.layers = [model.model.layers[0], model.model.layers[2]]
    smaller.lm_head = model.lm_head
    tokens = random_tokens(12)
    assert mx.array_equal(skip_layers(model, [1])(tokens), smaller(tokens))


def test_choose_skipped_layers_skips_idle_layers_first(monkeypatch):
    model = tiny("llama", num_hidden_layers=6)
    for name in (2, 4):
        idle = model.model.layers[name]
        idle.self_attn.o_proj.weight *= 0
        idle.mlp.down_proj.weight *= 0
    # Simulate a machine where every layer has a cost and further tokens are free.
    monkeypatch.setattr(
        layer_skip, "_forward_seconds", lambda model, num_tokens: len(model.layers)
    )
    assert set(choose_skipped_layers(model, random_tokens(40))) >= {2, 4}
    monkeypatch.setattr(
        layer_skip, "_forward_seconds", lambda model, num_tokens: 6.0 * num_tokens
    )
    assert choose_skipped_layers(model, random_tokens(40)) == []


def test_skip_layers_rejects_models_that_need_a_layer():
    model = sharpened("gemma3")
    with pytest.raises(UserError, match="with fewer layers"):
        skip_layers(model, [1])


def test_choose_skipped_layers_rejects_models_without_layers():
    with pytest.raises(UserError, match="no list of layers"):
        choose_skipped_layers(lambda tokens: tokens, mx.array([PROMPT]))
