"""KL divergence, its tail and top-1 agreement, compared with float64 NumPy."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.data.batching import Batch
from lmx.evaluation.divergence import measure_divergence
from test_perplexity import BATCHES, Table, make_batch

HISTOGRAMS = ("kl_histogram", "agreement_by_confidence")


def softmax(table):
    table = np.exp(np.array(table, np.float64))
    return table / table.sum(-1, keepdims=True)


def numpy_sequences(reference, model, batches):
    """(KL, agreement) of the trained positions of every sequence."""
    sequences = []
    for batch in batches:
        tokens, mask = np.array(batch.tokens)[:, :-1], np.array(batch.mask)
        p, q = (
            t - np.log(np.exp(t).sum(-1, keepdims=True))
            for t in (np.array(m.table, np.float64)[tokens] for m in (reference, model))
        )
        kl = (np.exp(p) * (p - q)).sum(-1)
        agreement = p.argmax(-1) == q.argmax(-1)
        sequences += [
            (kl[i][mask[i]], agreement[i][mask[i]])
            for i in range(len(kl))
            if mask[i].any()
        ]
    return sequences


def test_divergence_equals_numpy():
    reference, model = Table(0), Table(1)
    model.table = model.table + reference.table
    result = measure_divergence(reference, model, BATCHES)
    sequences = numpy_sequences(reference, model, BATCHES)
    kl, agreement = (np.concatenate(part) for part in zip(*sequences, strict=True))
    assert result.kl_mean == pytest.approx(kl.mean(), rel=1e-5)
    assert result.kl_p99 == pytest.approx(np.percentile(kl, 99), rel=1e-5)
    assert result.top1_agreement == pytest.approx(agreement.mean())
    assert 0 < result.top1_agreement < 1


def test_divergence_stderr_is_clustered():
    reference, model = Table(0), Table(1)
    result = measure_divergence(reference, model, BATCHES)
    sequences = [kl for kl, _ in numpy_sequences(reference, model, BATCHES)]
    mean, n = np.concatenate(sequences).mean(), len(sequences)
    squares = sum((kl - mean).sum() ** 2 for kl in sequences)
    expected = (n / (n - 1) * squares) ** 0.5 / sum(map(len, sequences))
    assert result.kl_stderr == pytest.approx(expected, rel=1e-4)


def test_divergence_from_itself_is_zero():
    result = vars(measure_divergence(Table(0), Table(0), BATCHES))
    histogram, by_confidence = (result.pop(name) for name in HISTOGRAMS)
    assert result == {
        "kl_mean": 0.0,
        "kl_stderr": 0.0,
        "kl_p99": 0.0,
        "top1_agreement": 1.0,
    }
    count = sum(int(batch.mask.sum()) for batch in BATCHES)
    assert histogram["positions"] == [count, *[0] * (len(histogram["edges"]) - 2)]
    assert by_confidence["agreed"] == by_confidence["positions"]


def test_divergence_histograms_equal_numpy():
    reference, model = Table(0), Table(1)
    model.table = model.table + reference.table
    result = measure_divergence(reference, model, BATCHES)
    sequences = numpy_sequences(reference, model, BATCHES)
    kl, agreement = (np.concatenate(part) for part in zip(*sequences, strict=True))
    edges, counts = result.kl_histogram.values()
    assert len(set(np.digitize(kl, edges))) > 2
    assert counts == np.histogram(np.clip(kl, edges[0], edges[-1]), edges)[0].tolist()
    confidence = np.concatenate(
        [
            softmax(np.array(reference.table)[tokens]).max(-1)[mask]
            for tokens, mask in (
                (np.array(b.tokens)[:, :-1], np.array(b.mask)) for b in BATCHES
            )
        ]
    )
    edges, positions, agreed = result.agreement_by_confidence.values()
    assert positions == np.histogram(confidence, edges)[0].tolist()
    assert agreed == np.histogram(confidence[agreement], edges)[0].tolist()
    assert 0 < sum(agreed) < sum(positions) == len(kl)


def test_divergence_is_weighted_by_the_reference():
    forward = measure_divergence(Table(0), Table(1), BATCHES).kl_mean
    backward = measure_divergence(Table(1), Table(0), BATCHES).kl_mean
    assert forward != pytest.approx(backward, rel=1e-2)


def test_divergence_ignores_a_constant_logit_offset():
    shifted = Table(0)
    shifted.table = shifted.table + 7.0
    result = measure_divergence(Table(0), shifted, BATCHES)
    assert result.kl_mean == pytest.approx(0, abs=1e-6)


def test_divergence_of_a_closer_model_is_lower():
    reference, batches = Table(0), [make_batch(50, 20, seed=9)]

    def kl(noise):
        model = Table(0)
        model.table = model.table + noise * Table(5).table
        return measure_divergence(reference, model, batches).kl_mean

    assert kl(0.01) < kl(0.1) < kl(1.0)
    # KL is quadratic for small differences.
    assert kl(0.02) == pytest.approx(4 * kl(0.01), rel=0.05)


def test_divergence_ignores_masked_positions():
    batch = BATCHES[0]
    tokens = mx.pad(batch.tokens, [(0, 3), (0, 5)])
    mask = mx.pad(batch.mask, [(0, 3), (0, 5)])
    padded = measure_divergence(Table(0), Table(1), [Batch(tokens, mask, ())])
    plain = measure_divergence(Table(0), Table(1), [batch])
    padded, plain = vars(padded), vars(plain)
    for name in HISTOGRAMS:
        assert padded.pop(name) == plain.pop(name)
    assert padded == pytest.approx(plain, rel=1e-6)
