"""Gap recovery: sums per sequence and their ratio, compared with float64 NumPy."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from lmx.data.batching import Batch
from lmx.evaluation.gap_recovery import gap_recovered, measure_per_sequence

VOCABULARY = 7


class Table(nn.Module):
    """Logits that depend only on the last token."""

    def __init__(self, seed):
        super().__init__()
        self.logits = mx.random.normal((VOCABULARY,) * 2, key=mx.random.key(seed))

    def __call__(self, tokens):
        return self.logits[tokens]


def batches():
    generator = np.random.default_rng(0)
    for sequences, length in ((3, 6), (2, 9)):
        tokens = generator.integers(0, VOCABULARY, (sequences, length))
        mask = generator.random((sequences, length - 1)) < 0.7
        yield Batch(mx.array(tokens.astype(np.int32)), mx.array(mask), ())


def test_per_sequence_sums_equal_numpy():
    reference, model = Table(0), Table(1)
    result = measure_per_sequence(reference, model, batches())
    p, q = (np.array(m.logits, np.float64) for m in (reference, model))
    p, q = (v - np.log(np.exp(v).sum(axis=-1, keepdims=True)) for v in (p, q))
    divergence = (np.exp(p) * (p - q)).sum(axis=-1)
    index = 0
    for batch in batches():
        for tokens, mask in zip(*map(np.array, batch.arrays[:2]), strict=True):
            places = np.flatnonzero(mask)
            loss = -q[tokens[places], tokens[places + 1]].sum()
            assert result.tokens[index] == len(places)
            assert result.loss[index] == pytest.approx(loss, rel=1e-5)
            kl = divergence[tokens[places]].sum()
            assert result.kl[index] == pytest.approx(kl, rel=1e-4)
            index += 1
    assert index == len(result.loss) == 5
    means = result.means
    assert means["kl"] == pytest.approx(result.kl.sum() / result.tokens.sum())
    assert means["loss_stderr"] > 0


def test_per_sequence_kl_from_itself_is_zero():
    model = Table(0)
    assert np.all(measure_per_sequence(model, model, batches()).kl == 0)


def test_gap_recovered_share():
    full, rounded = np.array([1.0, 2.0, 3.0]), np.array([2.0, 2.5, 4.5])
    assert gap_recovered(full, rounded, full) == (1.0, 0.0)
    assert gap_recovered(full, rounded, rounded) == (0.0, 0.0)
    # The share is equal for every sequence, so the standard error is 0.
    share, error = gap_recovered(full, rounded, rounded - 0.8 * (rounded - full))
    assert (share, error) == (pytest.approx(0.8), pytest.approx(0.0, abs=1e-12))
    assert gap_recovered(full, rounded, rounded + 1)[0] == pytest.approx(-1.0)


def test_gap_recovered_without_a_gap_is_none():
    full = np.array([1.0, 2.0])
    assert gap_recovered(full, full, full - 0.1) is None
    assert gap_recovered(full, full - 0.1, full) is None


def test_gap_recovered_stderr_equals_resampling():
    """The standard error equals the spread of shares over resampled sequences."""
    generator = np.random.default_rng(1)

    def draw(sequences):
        length = generator.integers(1, 20, sequences)
        full = length * generator.gamma(4.0, 0.25, sequences)
        rounded = full + length * generator.normal(0.3, 0.2, sequences)
        trained = full + 0.2 * (rounded - full) + generator.normal(0, 0.3, sequences)
        return full, rounded, trained

    shares, errors = np.array([gap_recovered(*draw(200)) for _ in range(400)]).T
    assert shares.mean() == pytest.approx(0.8, abs=0.01)
    assert errors.mean() == pytest.approx(shares.std(), rel=0.1)
