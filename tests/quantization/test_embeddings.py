"""What errors in embeddings cost: by the whole model, and by the divergence."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.models.blockwise import BlockwiseModel
from lmx.models.hooks import GradientTap, hook_calls
from lmx.models.loader import build_model
from lmx.quantization.ptq import embeddings, output_fisher
from lmx.quantization.ptq.embedding_clusters import LEAST_ROWS, clusters
from lmx.quantization.ptq.fisher import ForwardBackwardPass
from lmx.quantization.ptq.input_statistics import sampled_label_loss
from lmx.quantization.ptq.output_fisher import backward_sensitivity_pass
from mlx.utils import tree_map
from tiny_checkpoints import LLAMA

PATH = "model.embed_tokens"
TOKENS = mx.random.randint(0, 320, (6, 24), key=mx.random.key(0))
SIZES = {"num_hidden_layers": 3, "vocab_size": 320}


def model_of(*, tied, **changes):
    mx.random.seed(5)
    model = build_model(LLAMA | SIZES | {"tie_word_embeddings": tied} | changes)
    model.update(tree_map(lambda v: 2 * v if v.ndim > 1 else v, model.parameters()))
    return model.eval()


def moments(model, folder, tokens=TOKENS, rows=4):
    parts = [tokens[start : start + rows] for start in range(0, len(tokens), rows)]
    model = BlockwiseModel(model)
    given = {"compute": mx.float32, "folder": folder}
    counted = [mx.ones(part.shape, mx.bool_) for part in parts]
    found = backward_sensitivity_pass(
        model, [PATH], [[]] * len(model), parts, counted, **given
    )
    return found[PATH]


def slopes_of(model, row, key):
    """Of the loss of drawn tokens, by what the embedding is looked up for."""
    call = f"{PATH}:0"

    def loss(shift):
        with hook_calls(model, [PATH], GradientTap({call: shift})):
            return sampled_label_loss(model(row), key)

    shift = mx.zeros((*row.shape, model.args.hidden_size))
    return np.array(mx.grad(loss)(shift)[0], np.float64)


def of_head(model, row):
    """What goes into the head, and chances of all tokens."""
    tap = GradientTap()
    with hook_calls(model, [PATH], tap):
        logits = model(row)
    return tap.inputs.get(f"{PATH}:1", [None])[0], softmax(np.array(logits[0]))


def softmax(logits):
    chances = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return chances / chances.sum(axis=-1, keepdims=True)


def blended(own, mean, count, enough):
    share = count / (count + enough)
    return share * own + (1 - share) * mean


@pytest.mark.parametrize(
    ("tied", "few"), [(True, 1 << 13), (False, 1 << 13), (True, 50)]
)
def test_block_by_block_comes_what_the_whole_model_gives(
    tmp_path, monkeypatch, tied, few
):
    monkeypatch.setattr(embeddings, "FEW_TOKENS", few)
    model = model_of(tied=tied)
    found = moments(model, tmp_path)
    kinds = np.array(found.clusters)
    number = kinds.max() + 1
    assert number > 2
    slopes = [slopes_of(model, r[None], mx.random.key(n)) for n, r in enumerate(TOKENS)]
    slopes, seen = np.concatenate(slopes), kinds[np.array(TOKENS).reshape(-1)]
    same = np.eye(slopes.shape[1]) / slopes.shape[1]
    squares, heads = [], []
    for kind in range(number):
        rows = slopes[seen == kind]
        own = rows.T @ rows / TOKENS.size
        share = embeddings.SHRINKAGE * min(1, embeddings.FEW_TOKENS / TOKENS.size)
        squares.append((1 - share) * own + share * np.trace(own) * same)
    counts = np.bincount(seen, minlength=number)
    chances = counts + embeddings.UNSEEN_LOOK_UPS * np.bincount(kinds)
    chances = chances / chances.sum()
    expected = [
        blended(own, chance * sum(squares), count, embeddings.LOOK_UPS)
        for own, chance, count in zip(squares, chances, counts, strict=True)
    ]
    if tied:
        pairs = [of_head(model, row[None]) for row in TOKENS]
        x = np.concatenate([np.array(pair[0], np.float64) for pair in pairs])
        p = np.concatenate([pair[1] for pair in pairs])
        for kind in range(number):
            weights = (p * (1 - p))[:, kinds == kind].sum(axis=1)
            heads.append(((x * weights[:, None]).T @ x, weights.sum()))
        every = sum(own for own, _ in heads) / sum(count for _, count in heads)
        for kind, (own, count) in enumerate(heads):
            whole = blended(own, count * every, count, embeddings.PREDICTIONS)
            expected[kind] = expected[kind] + whole / TOKENS.size
    largest = np.abs(expected).max()
    np.testing.assert_allclose(found.squares, expected, atol=2e-4 * largest)
    np.testing.assert_array_equal(found.counts, counts)
    assert not list(tmp_path.iterdir())
    assert not model.training


@pytest.mark.parametrize("tied", [True, False])
def test_moments_foretell_the_divergence(tmp_path, tied, monkeypatch):
    """Half of what an error costs by them, in nats a token."""
    for name in ("SHRINKAGE", "LOOK_UPS", "PREDICTIONS"):
        monkeypatch.setattr(embeddings, name, 1e-9)
    monkeypatch.setattr(output_fisher, "TOKENS_PER_COLUMN", 1000)
    model = model_of(tied=tied)
    tokens = mx.random.randint(0, 320, (48, 24), key=mx.random.key(1))
    found = moments(model, tmp_path, tokens)
    squares, kinds = np.array(found.squares, np.float64), np.array(found.clusters)
    before = np.log(softmax(np.array(model(tokens))))
    weight = model.model.embed_tokens.weight
    off = 0.01 * mx.random.normal(weight.shape, key=mx.random.key(2))
    model.model.embed_tokens.weight = weight + off
    after = np.log(softmax(np.array(model(tokens))))
    found = (np.exp(before) * (before - after)).sum(axis=-1).mean()
    # Rows of a cluster are not told apart: a mean over them stands for all.
    off = np.array(off, np.float64)
    each = np.einsum("vi,vij,vj->v", off, squares[kinds], off)
    expected = sum(each[kinds == kind].mean() for kind in set(kinds)) / 2
    assert found == pytest.approx(expected, rel=0.2)


def test_few_tokens_go_back_and_all_count_for_the_head(tmp_path, monkeypatch):
    monkeypatch.setattr(output_fisher, "TOKENS_PER_COLUMN", 0.5)
    ways = []
    for name in ("turn", "backward"):
        real = getattr(ForwardBackwardPass, name)

        def noted(way, *given, real=real):
            ways.append((way.back, len(way.parts)))
            return real(way, *given)

        monkeypatch.setattr(ForwardBackwardPass, name, noted)
    # 128 columns, and 24 tokens a part.
    moments(model_of(tied=True), tmp_path, rows=1)
    moments(model_of(tied=False), tmp_path, rows=1)
    assert ways == [(3, 6)] * 2 + [(3, 3)] * 2


def test_rows_of_one_direction_are_one_cluster():
    draw = np.random.default_rng(0)
    centers = draw.normal(size=(3, 64))
    kinds = draw.integers(0, 3, 600)
    sizes = np.exp(draw.normal(size=(600, 1)))
    rows = sizes * (centers[kinds] + 0.1 * draw.normal(size=(600, 64)))
    found = np.array(clusters(mx.array(rows, mx.float32), mx.array(kinds == 1)))
    assert len(set(found)) <= 600 // LEAST_ROWS
    for kind in set(found):
        assert len(set(kinds[found == kind])) == 1
    # Those that are seen are told apart more finely.
    assert len(set(found[kinds == 1])) > len(set(found[kinds == 0]))


def test_few_rows_of_a_wide_embedding_are_not_told_apart():
    assert not clusters(mx.random.normal((32, 128)), mx.ones(32)).any()
