"""mlx-vlm drafts with our EAGLE-3 drafter as our proposer does."""

import json

import mlx.core as mx
import numpy as np
import pytest
from lmx.generation.kv_cache.sequence import CacheState
from lmx.generation.sampler import Sampler
from lmx.generation.sampling import Sampling
from lmx.generation.speculative.eagle3 import Eagle3Proposer
from lmx.models.drafters.io import load_drafter, save_drafter
from lmx.models.hooks import forward_with_hidden_states
from lmx.models.loader import build_model
from mlx.utils import tree_map
from tiny_eagle3 import fitted_drafter
from tiny_families import VOCABULARY, config

pytest.importorskip("mlx_vlm")

PROMPT, NUM_DRAFT_TOKENS, ROUNDS = [5, 9, 11, 5, 9, 2, 7, 5, 9], 4, 12


@pytest.fixture(scope="module")
def model():
    """A random target whose next token varies."""
    mx.random.seed(0)
    model = build_model(config("llama") | {"num_hidden_layers": 6})
    return model.update(
        tree_map(lambda w: w + 0.25 * mx.random.normal(w.shape), model.parameters())
    ).eval()


@pytest.fixture(scope="module")
def text(model):
    """The prompt and the most likely tokens after it."""
    cache, tokens = CacheState(model), list(PROMPT)
    for _ in range(48):
        logits = cache.forward(mx.array([tokens[cache.length :]]))
        tokens.append(mx.argmax(logits[0, -1]).item())
    return tokens


@pytest.fixture(scope="module")
def folder(model, text, tmp_path_factory):
    """A drafter that reads three of the six blocks, as mlx-vlm requires."""
    folder = tmp_path_factory.mktemp("drafter")
    drafter = fitted_drafter(model, text, layer_ids=None)
    assert drafter.layer_ids == (0, 2, 4)
    save_drafter(folder, drafter, mx.float32)
    return folder


def our_draft(model, drafter, context):
    cache = CacheState(model)
    proposer = Eagle3Proposer(drafter, cache)
    cache.forward(mx.array([context[:-1]]))
    sampler = Sampler(Sampling(), context, VOCABULARY)
    return proposer.propose(context, NUM_DRAFT_TOKENS, sampler).tolist()


def their_drafts(model, folder, text, block_ids=None):
    """Drafts of mlx-vlm after every prefix of the text, with one cache."""
    from mlx_vlm.speculative.drafters import load_drafter

    drafter, kind = load_drafter(str(folder))
    assert kind == "eagle3"
    block_ids = block_ids or drafter.config.capture_layer_ids
    drafter.reset(model)
    _, states = forward_with_hidden_states(model, mx.array([text]), block_ids)
    start, options = len(PROMPT), {"sampler": None, "greedy": True}
    drafter.prefill_from_target_hidden(
        mx.array([text[:start]]), states[:, :start], text[start], **options
    )
    drafts = []
    for position in range(start, start + ROUNDS):
        at = states[:, position : position + 1]
        draft = drafter.draft_block(
            text[position], at, None, NUM_DRAFT_TOKENS + 1, **options
        )
        drafts.append(draft[0].tolist())
        # The target accepts no draft token, and continues the text.
        drafter.accept_verified_tokens(at, draft, 0, [text[position + 1]], **options)
    return drafts


def test_drafts_equal_ours(model, text, folder):
    drafter = load_drafter(folder, model)
    ours = [
        our_draft(model, drafter, text[: len(PROMPT) + 1 + n]) for n in range(ROUNDS)
    ]
    assert their_drafts(model, folder, text) == ours
    right = [draft[0] == text[len(PROMPT) + 1 + n] for n, draft in enumerate(ours)]
    assert sum(right) > ROUNDS // 4
    # The control: the ids of the file are not those of blocks.
    block_ids = json.loads((folder / "config.json").read_text())[
        "eagle_aux_hidden_state_layer_ids"
    ]
    assert their_drafts(model, folder, text, block_ids) != ours


def test_logits_equal_ours(model, text, folder):
    from mlx_vlm.speculative.drafters import load_drafter as load_theirs

    drafter = load_drafter(folder, model)
    tokens = mx.array([text])
    _, states = forward_with_hidden_states(model, tokens[:, :-1], drafter.layer_ids)
    output = drafter.read(tokens[:, 1:], states, drafter.make_cache())
    theirs, _ = load_theirs(str(folder))
    theirs.reset(model)
    their_output = theirs._forward_tokens(tokens[:, 1:], states, mx.int32)
    assert mx.allclose(their_output, output, atol=1e-4)
    logits, their_logits = drafter.head(output), theirs._logits(their_output)
    scale = mx.abs(logits).max().item()
    assert mx.abs(logits - their_logits).max().item() < 1e-5 * scale
    best = mx.argmax(logits, axis=-1)
    expected = drafter.target_tokens(best)
    assert np.array_equal(theirs._draft_to_target(best, mx.int32), expected)
