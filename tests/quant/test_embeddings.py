"""What errors in embeddings cost: by the whole model, and by the divergence."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from tiny_checkpoints import LLAMA

from toolkit.model.blockwise import Blockwise
from toolkit.model.load import build
from toolkit.quant import embeddings
from toolkit.quant.embeddings import moments_of_embeddings
from toolkit.quant.signals import Tap, loss_of_predictions, tapped

PATH = "model.embed_tokens"
TOKENS = mx.random.randint(0, 320, (6, 24), key=mx.random.key(0))
SIZES = {"num_hidden_layers": 3, "vocab_size": 320}


def model_of(*, tied, **changes):
    mx.random.seed(5)
    model = build(LLAMA | SIZES | {"tie_word_embeddings": tied} | changes)
    model.update(tree_map(lambda v: 2 * v if v.ndim > 1 else v, model.parameters()))
    return model.eval()


def moments(model, folder, tokens=TOKENS, rows=4):
    parts = [tokens[start : start + rows] for start in range(0, len(tokens), rows)]
    wanted = {"compute": mx.float32, "at": folder}
    return moments_of_embeddings(Blockwise(model), [PATH], parts, **wanted)[PATH]


def slopes_of(model, row, key):
    """Of the loss of drawn tokens, by what every call of the embedding gives."""
    first = Tap()
    with tapped(model, [PATH], first):
        model(row)

    def loss(shifts):
        with tapped(model, [PATH], Tap(shifts)):
            return loss_of_predictions(model(row), key)

    found = mx.grad(loss)({k: mx.zeros_like(v) for k, v in first.outputs.items()})
    return first.inputs, {k: np.array(v[0], np.float64) for k, v in found.items()}


@pytest.mark.parametrize("tied", [True, False])
def test_block_by_block_comes_what_the_whole_model_gives(tmp_path, tied):
    model = model_of(tied=tied)
    information, inputs, answer = 0.0, 0.0, 0.0
    for number, row in enumerate(TOKENS):
        seen, slopes = slopes_of(model, row[None], mx.random.key(number))
        information += slopes[f"{PATH}:0"].T @ slopes[f"{PATH}:0"]
        if tied:
            x = np.array(seen[f"{PATH}:1"][0], np.float64)
            inputs += x.T @ x
            answer += np.square(slopes[f"{PATH}:1"]).sum()
    information /= TOKENS.size
    same = np.trace(information) / len(information) * np.eye(len(information))
    share = embeddings.SHRINKAGE
    expected = (1 - share) * information + share * same
    expected += answer / TOKENS.size * inputs / TOKENS.size
    found = moments(model, tmp_path)
    assert found.counts.item() == TOKENS.size
    np.testing.assert_allclose(
        found.squares, expected, atol=2e-4 * np.abs(expected).max()
    )
    assert not list(tmp_path.iterdir())
    assert not model.training


@pytest.mark.parametrize("tied", [True, False])
def test_moments_foretell_the_divergence(tmp_path, tied, monkeypatch):
    """Half of what an error costs by them, in nats a token."""
    monkeypatch.setattr(embeddings, "SHRINKAGE", 0.0)
    monkeypatch.setattr(embeddings, "TOKENS_PER_COLUMN", 1000)
    model = model_of(tied=tied)
    tokens = mx.random.randint(0, 320, (48, 24), key=mx.random.key(1))
    squares = np.array(moments(model, tmp_path, tokens).squares, np.float64)
    before = log_probabilities(model, tokens)
    weight = model.model.embed_tokens.weight
    off = 0.01 * mx.random.normal(weight.shape, key=mx.random.key(2))
    model.model.embed_tokens.weight = weight + off
    after = log_probabilities(model, tokens)
    found = (np.exp(before) * (before - after)).sum(axis=-1).mean()
    # Every row counts as often as it is looked up, and predicted, which is about alike.
    rows = np.array(off, np.float64)[np.array(tokens).reshape(-1)]
    expected = 0.5 * np.einsum("ti,ij,tj->t", rows, squares, rows).mean()
    assert found == pytest.approx(expected, rel=0.2)


def log_probabilities(model, tokens):
    logits = np.array(model(tokens), np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_few_tokens_go_back_and_all_count_for_the_head(tmp_path, monkeypatch):
    monkeypatch.setattr(embeddings, "TOKENS_PER_COLUMN", 0.5)
    ways = []
    for name in ("_from_logits", "_backward"):
        real = getattr(embeddings._Way, name)

        def noted(way, *given, real=real):
            ways.append((way.back, len(way.parts)))
            return real(way, *given)

        monkeypatch.setattr(embeddings._Way, name, noted)
    # 128 columns, and 24 tokens a part.
    moments(model_of(tied=True), tmp_path, rows=1)
    moments(model_of(tied=False), tmp_path, rows=1)
    assert ways == [(3, 6)] * 2 + [(3, 3)] * 2
