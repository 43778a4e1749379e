"""Embedding statistics compared with the full model and with the divergence."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.interfaces import Logger
from lmx.models.blockwise import BlockwiseModel
from lmx.models.hooks import GradientTap, hook_calls
from lmx.quantization.ptq import embeddings, output_fisher
from lmx.quantization.ptq.embeddings import MIN_CLUSTER_ROWS, cluster_rows
from lmx.quantization.ptq.fisher import ForwardBackwardPass, sampled_label_loss
from lmx.quantization.ptq.output_fisher import estimate_output_fisher
from quantization_samples import enlarged_model
from tiny_checkpoints import LLAMA

PATH = "model.embed_tokens"
TOKENS = mx.random.randint(0, 320, (6, 24), key=mx.random.key(0))
SIZES = {"num_hidden_layers": 3, "vocab_size": 320}


def model_of(*, tied, **changes):
    return enlarged_model(LLAMA | SIZES | {"tie_word_embeddings": tied} | changes)


def statistics_of(model, folder, tokens=TOKENS, shard_size=4):
    shards = [
        tokens[start : start + shard_size]
        for start in range(0, len(tokens), shard_size)
    ]
    model = BlockwiseModel(model)
    counted = [mx.ones(shard.shape, mx.bool_) for shard in shards]
    no_paths = [[]] * len(model)
    statistics = estimate_output_fisher(
        *(model, [PATH], no_paths, shards, counted),
        compute=mx.float32,
        folder=folder,
        max_tokens=4096,
        logger=Logger(),
    )
    return statistics[PATH]


def gradients_of(model, sequence, key):
    """Return gradients of the sampled-label loss with respect to the lookups."""
    call = f"{PATH}:0"

    def loss(shift):
        with hook_calls(model, [PATH], GradientTap({call: shift})):
            return sampled_label_loss(model(sequence), key)

    shift = mx.zeros((*sequence.shape, model.args.hidden_size))
    return np.array(mx.grad(loss)(shift)[0], np.float64)


def head_inputs(model, sequence):
    """Return the lm_head inputs and the probabilities of all tokens."""
    tap = GradientTap()
    with hook_calls(model, [PATH], tap):
        logits = model(sequence)
    return tap.inputs.get(f"{PATH}:1", [None])[0], softmax(np.array(logits[0]))


def softmax(logits):
    probs = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return probs / probs.sum(axis=-1, keepdims=True)


def blend(cluster_moments, mean, count, half):
    share = count / (count + half)
    return share * cluster_moments + (1 - share) * mean


@pytest.mark.parametrize(
    ("tied", "few"), [(True, 1 << 13), (False, 1 << 13), (True, 50)]
)
def test_embedding_statistics_match_the_whole_model(tmp_path, monkeypatch, tied, few):
    monkeypatch.setattr(embeddings, "FEW_TOKENS", few)
    model = model_of(tied=tied)
    statistics = statistics_of(model, tmp_path)
    clusters = np.array(statistics.clusters)
    num_clusters = clusters.max() + 1
    assert num_clusters > 2
    gradients = np.concatenate(
        [gradients_of(model, r[None], mx.random.key(n)) for n, r in enumerate(TOKENS)]
    )
    by_token = clusters[np.array(TOKENS).reshape(-1)]
    identity = np.eye(gradients.shape[1]) / gradients.shape[1]
    fisher, heads = [], []
    for cluster in range(num_clusters):
        rows = gradients[by_token == cluster]
        cluster_moments = rows.T @ rows / TOKENS.size
        share = embeddings.SHRINKAGE * min(1, embeddings.FEW_TOKENS / TOKENS.size)
        fisher.append(
            (1 - share) * cluster_moments + share * np.trace(cluster_moments) * identity
        )
    counts = np.bincount(by_token, minlength=num_clusters)
    lookups = counts + embeddings.PRIOR_LOOKUPS * np.bincount(clusters)
    shares = lookups / lookups.sum()
    expected = [
        blend(cluster_moments, share * sum(fisher), count, embeddings.HALF_LOOKUPS)
        for cluster_moments, share, count in zip(fisher, shares, counts, strict=True)
    ]
    if tied:
        pairs = [head_inputs(model, sequence[None]) for sequence in TOKENS]
        x = np.concatenate([np.array(pair[0], np.float64) for pair in pairs])
        p = np.concatenate([pair[1] for pair in pairs])
        for cluster in range(num_clusters):
            weights = (p * (1 - p))[:, clusters == cluster].sum(axis=1)
            heads.append(((x * weights[:, None]).T @ x, weights.sum()))
        mean = sum(cluster_moments for cluster_moments, _ in heads) / sum(
            count for _, count in heads
        )
        for cluster, (cluster_moments, count) in enumerate(heads):
            moments = blend(
                cluster_moments, count * mean, count, embeddings.HALF_PREDICTIONS
            )
            expected[cluster] = expected[cluster] + moments / TOKENS.size
    largest = np.abs(expected).max()
    np.testing.assert_allclose(statistics.second_moments, expected, atol=2e-4 * largest)
    np.testing.assert_array_equal(statistics.counts, counts)
    assert not list(tmp_path.iterdir())
    assert not model.training


@pytest.mark.parametrize("tied", [True, False])
def test_moments_predict_the_divergence(tmp_path, tied, monkeypatch):
    """The divergence in nats per token is half the cost of a weight error."""
    for name in ("SHRINKAGE", "HALF_LOOKUPS", "HALF_PREDICTIONS"):
        monkeypatch.setattr(embeddings, name, 1e-9)
    monkeypatch.setattr(output_fisher, "TOKENS_PER_COLUMN", 1000)
    model = model_of(tied=tied)
    tokens = mx.random.randint(0, 320, (48, 24), key=mx.random.key(1))
    statistics = statistics_of(model, tmp_path, tokens)
    moments = np.array(statistics.second_moments, np.float64)
    clusters = np.array(statistics.clusters)
    before = np.log(softmax(np.array(model(tokens))))
    weight = model.model.embed_tokens.weight
    error = 0.01 * mx.random.normal(weight.shape, key=mx.random.key(2))
    model.model.embed_tokens.weight = weight + error
    after = np.log(softmax(np.array(model(tokens))))
    divergence = (np.exp(before) * (before - after)).sum(axis=-1).mean()
    # Rows of a cluster share their moments, so their mean cost represents all rows.
    error = np.array(error, np.float64)
    costs = np.einsum("vi,vij,vj->v", error, moments[clusters], error)
    expected = sum(costs[clusters == c].mean() for c in set(clusters)) / 2
    assert divergence == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("tied", [False, True])
def test_fisher_pass_uses_few_tokens(tied, tmp_path, monkeypatch):
    monkeypatch.setattr(output_fisher, "TOKENS_PER_COLUMN", 0.5)
    shards = []
    for name in ("forward", "start_backward", "backward"):
        original = getattr(ForwardBackwardPass, name)

        def recorded(fb_pass, *args, original=original, **kwargs):
            shards.append(len(fb_pass.tokens))
            return original(fb_pass, *args, **kwargs)

        monkeypatch.setattr(ForwardBackwardPass, name, recorded)
    # There are 128 columns, and 6 shards of 24 tokens.
    statistics_of(model_of(tied=tied), tmp_path, shard_size=1)
    assert shards == [3, 3, 3]


def test_cluster_rows_groups_rows_of_one_direction():
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(3, 64))
    kinds = rng.integers(0, 3, 600)
    norms = np.exp(rng.normal(size=(600, 1)))
    rows = norms * (centers[kinds] + 0.1 * rng.normal(size=(600, 64)))
    clusters = cluster_rows(mx.array(rows, mx.float32), mx.array(kinds == 1))
    clusters = np.array(clusters)
    assert len(set(clusters)) <= 600 // MIN_CLUSTER_ROWS
    for cluster in set(clusters):
        assert len(set(kinds[clusters == cluster])) == 1
    # Frequent rows have finer clusters.
    assert len(set(clusters[kinds == 1])) > len(set(clusters[kinds == 0]))


def test_cluster_rows_of_a_small_wide_embedding_is_one_cluster():
    assert not cluster_rows(mx.random.normal((32, 128)), mx.ones(32)).any()
