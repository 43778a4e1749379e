"""KL divergence, its tail and top-1 agreement, compared with float64 NumPy; what QAT
recovers of a gap."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.errors import UserError
from lmx.evaluation.divergence import measure_divergence
from lmx.evaluation.gap_recovery import gap_recovered, measure_per_sequence
from lmx.evaluation.perplexity import measure_perplexity
from processes import in_turn
from test_perplexity import BATCHES, Table, losses_by_sequence, make_batch, padded


def kl(reference, model, batches=BATCHES):
    return measure_divergence(reference, model, batches).kl_mean


def numpy_sequences(reference, model, batches):
    """(KL, agreement) of the trained positions of every sequence."""
    sequences = []
    for batch in batches:
        tokens, mask = np.array(batch.tokens)[:, :-1], np.array(batch.mask)
        p, q = (
            t - np.log(np.exp(t).sum(-1, keepdims=True))
            for t in (np.array(m.table, np.float64)[tokens] for m in (reference, model))
        )
        values = (np.exp(p) * (p - q)).sum(-1), p.argmax(-1) == q.argmax(-1)
        rows = [i for i in range(len(mask)) if mask[i].any()]
        sequences += [[value[i][mask[i]] for value in values] for i in rows]
    return sequences


def test_divergence_equals_numpy():
    """The mean and its clustered error, the tail, agreement, and the loss of the
    same pass; padding changes nothing."""
    reference, model = Table(0), Table(1)
    model.table = model.table + reference.table
    sequences = numpy_sequences(reference, model, BATCHES)
    divergence, agrees = map(np.concatenate, zip(*sequences, strict=True))
    mean, n = divergence.mean(), len(sequences)
    squares = sum((each - mean).sum() ** 2 for each, *_ in sequences)
    for batches in (BATCHES, [padded(batch) for batch in BATCHES]):
        result = measure_divergence(reference, model, batches)
        assert result.kl_mean == pytest.approx(mean, rel=1e-5)
        stderr = (n / (n - 1) * squares) ** 0.5 / len(divergence)
        assert result.kl_stderr == pytest.approx(stderr, rel=1e-4)
        assert result.kl_p99 == pytest.approx(np.percentile(divergence, 99), rel=1e-5)
        assert result.top1_agreement == pytest.approx(agrees.mean())
        assert 0 < result.top1_agreement < 1
        expected = measure_perplexity(model, batches)
        assert result.perplexity.value == pytest.approx(expected.value, rel=1e-6)
        assert result.perplexity.tokens == expected.tokens
    assert not {"perplexity", "sequence_kl"} & result.figures.keys()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("is_wrong", [False, True])
def test_ranks_have_the_figures_of_one_process(size, is_wrong):
    """Each compares some sequences of every batch; perplexity has the same parts."""
    models = Table(0), Table(1)
    one = measure_divergence(*models, BATCHES)
    shared = in_turn(
        lambda ranks: measure_divergence(*models, BATCHES, ranks),
        size,
        is_wrong=is_wrong,
    )
    figures = [r.figures | {"stderr": r.perplexity.stderr} for r in (one, shared)]
    assert (figures[0] == pytest.approx(figures[1], rel=1e-6)) != is_wrong
    losses = in_turn(
        lambda ranks: measure_perplexity(models[1], BATCHES, ranks),
        size,
        is_wrong=is_wrong,
    )
    assert (losses.loss == pytest.approx(one.perplexity.loss, rel=1e-6)) != is_wrong
    assert losses.tokens == one.perplexity.tokens or is_wrong


def test_divergence_from_itself_is_zero():
    figures = measure_divergence(Table(0), Table(0), BATCHES).figures
    zeros = dict.fromkeys(("kl_mean", "kl_stderr", "kl_p99"), 0.0)
    assert figures == zeros | {"top1_agreement": 1.0}


def test_divergence_depends_on_direction_and_distance():
    one, other, batches = Table(0), Table(1), [make_batch(50, 20, seed=9)]
    assert kl(one, other) != pytest.approx(kl(other, one), rel=1e-2)
    shifted = Table(0)
    shifted.table = shifted.table + 7.0
    assert kl(one, shifted) == pytest.approx(0, abs=1e-6)

    def noisy(noise):
        model = Table(0)
        model.table = model.table + noise * Table(5).table
        return kl(one, model, batches)

    assert noisy(0.01) < noisy(0.1) < noisy(1.0)
    # KL is quadratic for small differences.
    assert noisy(0.02) == pytest.approx(4 * noisy(0.01), rel=0.05)


def test_divergence_refuses_nan():
    model = Table(0)
    model.table[3, 5] = mx.nan
    with pytest.raises(UserError, match="predictions are NaN"):
        measure_divergence(Table(0), model, BATCHES)


def test_per_sequence_sums_equal_numpy():
    reference, model = Table(0), Table(1)
    result = measure_per_sequence(reference, model, BATCHES)
    losses = losses_by_sequence(model, BATCHES)
    divergences = [each for each, *_ in numpy_sequences(reference, model, BATCHES)]
    assert result.tokens.tolist() == [*map(len, losses)]
    assert result.loss == pytest.approx([s.sum() for s in losses], rel=1e-5)
    assert result.kl == pytest.approx([s.sum() for s in divergences], rel=1e-4)
    means = result.means
    assert means["kl"] == pytest.approx(result.kl.sum() / result.tokens.sum())
    assert means["loss_stderr"] > 0


def test_gap_recovered_share():
    full, rounded = np.array([1.0, 2.0, 3.0]), np.array([2.0, 2.5, 4.5])
    assert gap_recovered(full, rounded, full) == (1.0, 0.0)
    assert gap_recovered(full, rounded, rounded) == (0.0, 0.0)
    # The share is equal for every sequence, so the standard error is 0.
    share, error = gap_recovered(full, rounded, rounded - 0.8 * (rounded - full))
    assert (share, error) == (pytest.approx(0.8), pytest.approx(0.0, abs=1e-12))
    assert gap_recovered(full, rounded, rounded + 1)[0] == pytest.approx(-1.0)
    # There is no gap.
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
