"""The chunked loss compared with the loss of all logits at once."""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from lmx.models.blockwise import NoTrunkHeadSplit
from lmx.models.cross_entropy import cross_entropy_sum
from lmx.training.chunked_loss import ChunkedLossModel
from mlx.utils import tree_flatten
from tiny_llamas import GRID_MODES, MODES, family, llama, tokens_of
from tiny_steps import Tiny, assert_close, loss_and_gradients, make_step, peak_memory


def outputs(model, fake_quant, chunk, batch, **settings):
    chunked = ChunkedLossModel(model, chunk) if chunk else None
    options = settings | {"weight_transform": fake_quant, "name": "sgd"}
    step = make_step(model, loss_model=chunked, **options)
    loss, gradients = loss_and_gradients(step, batch)
    assert step.evaluate([batch])[0] == pytest.approx(loss, rel=1e-5)
    return loss, gradients


def assert_alike(result, expected):
    assert result[0] == pytest.approx(expected[0], rel=1e-5)
    assert_close(result[1], expected[1])


@pytest.mark.parametrize(
    ("mode", "tied"),
    [("full", False), *((m, True) for m in MODES), *((m, False) for m in GRID_MODES)],
)
def test_chunked_loss_and_gradients_equal_full_logits(mode, tied):
    batch = tokens_of()
    expected = outputs(*llama(mode, tie_word_embeddings=tied), None, batch)
    # 33 tokens: chunks of 7 end within sequences, and the last chunk is smaller.
    assert_alike(outputs(*llama(mode, tie_word_embeddings=tied), 7, batch), expected)
    assert sum(np.abs(g).max() > 0 for g in expected[1].values()) > 5


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3", "phi3", "gemma3", "cohere", "qwen3_moe"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "mamba")),
    ],
)
def test_chunked_loss_equals_full_logits_for_every_family(name):
    batch = tokens_of()
    expected = outputs(family(name), None, None, batch)
    lean = {"gradient_checkpointing": True}
    assert_alike(outputs(family(name), None, 7, batch, **lean), expected)


def test_gradients_are_those_of_a_scaled_sum():
    model, batch = llama()[0], tokens_of()
    chunked = ChunkedLossModel(model, 7)

    def loss(model, factor):
        arrays = batch.arrays(with_places=False)
        return factor * chunked.sum_over_tokens(arrays, cross_entropy_sum)

    one, two = (
        dict(tree_flatten(nn.value_and_grad(model, loss)(model, factor)[1]))
        for factor in (1.0, 2.0)
    )
    assert_close(two, {path: np.array(2 * gradient) for path, gradient in one.items()})


def test_chunked_loss_keeps_logit_soft_caps():
    batch, model = tokens_of(), family("gemma2")
    bare = model.model.embed_tokens.as_linear(model.model(batch.tokens[:, :-1]))
    uncapped = cross_entropy_sum(bare, batch.tokens[:, 1:], batch.mask).item()
    assert abs(uncapped - outputs(model, None, 5, batch)[0]) > 1e-2


def test_chunked_loss_refuses_a_model_without_blocks():
    with pytest.raises(NoTrunkHeadSplit, match="no trunk"):
        ChunkedLossModel(Tiny(), 8)


class Sideways(nn.Module):
    """A model whose head uses neighboring positions or the tokens."""

    def __init__(self, head):
        super().__init__()
        self.inner, _ = llama()
        self.head = head

    @property
    def layers(self):
        return self.inner.layers

    def __call__(self, tokens):
        return self.head(self.inner(tokens), tokens)


@pytest.mark.parametrize(
    "head",
    [
        lambda logits, tokens: logits + logits.mean(1, keepdims=True),
        lambda logits, tokens: logits + tokens[..., None],
    ],
)
def test_chunked_loss_refuses_a_head_that_mixes_tokens(head):
    with pytest.raises(NoTrunkHeadSplit, match="are off by"):
        ChunkedLossModel(Sideways(head), 8)
    assert ChunkedLossModel(Sideways(lambda logits, tokens: 2 * logits), 8)


@pytest.mark.fused
def test_chunked_loss_uses_less_memory():
    def peak(chunk):
        model, _ = llama(vocab_size=8192, num_hidden_layers=1)
        model.freeze()
        model.layers[0].unfreeze()
        chunked = ChunkedLossModel(model, chunk) if chunk else None
        return peak_memory(make_step(model, loss_model=chunked), tokens_of(8, 128))

    logits = 4 * 8192 * 1024
    assert peak(None) > 2 * logits
    assert peak(16) < 0.6 * logits


def sparse(places, sequences=4, length=24):
    """A batch that trains only the targets at `places` of the B * L positions."""
    batch = tokens_of(sequences, length)
    mask = np.zeros(sequences * length, bool)
    mask[places] = True
    return replace(batch, mask=mx.array(mask.reshape(sequences, length)))


@pytest.mark.parametrize("trained", [range(3, 96, 7), range(30, 41), [95], []])
@pytest.mark.parametrize("chunk", [None, 5])
def test_head_runs_on_trained_positions_only(trained, chunk):
    batch = sparse(list(trained))
    parts = -(-max(1, len(trained)) // 12)
    assert len(batch.head_positions) == 12 * parts
    assert set(trained) <= set(batch.head_positions.tolist())
    model, _ = llama()
    step = make_step(model, loss_model=ChunkedLossModel(model, chunk), name="sgd")
    chunk_sizes, head = [], model.model.embed_tokens.as_linear
    model.model.embed_tokens.as_linear = lambda x: (
        chunk_sizes.append(x.shape[1]) or head(x)
    )
    result = loss_and_gradients(step, batch)
    # The first call traces the trunk without computing it. Then come the chunks.
    assert sum(chunk_sizes[1:]) == len(batch.head_positions)
    assert_alike(result, outputs(*llama(), None, batch))


def test_batch_without_padding_has_no_places():
    assert sparse(range(96)).head_positions is None
    assert sparse(range(90)).head_positions is None
    assert len(sparse(range(80)).head_positions) == 84
