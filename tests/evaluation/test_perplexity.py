"""Perplexity and its standard error, compared with float64 NumPy."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from lmx.data.batching import Batch
from lmx.errors import UserError
from lmx.evaluation.perplexity import eval_batch_tokens, measure_perplexity

VOCABULARY = 13


class Table(nn.Module):
    """A model whose logits after a token are a row of a table."""

    def __init__(self, seed, scale=2.0):
        super().__init__()
        shape = (VOCABULARY, VOCABULARY)
        self.table = mx.array(np.random.default_rng(seed).normal(size=shape) * scale)

    def __call__(self, tokens):
        return self.table[tokens]


def make_batch(sequences, length, *, seed=0):
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, VOCABULARY, (sequences, length + 1))
    mask = generator.random((sequences, length)) < generator.random((sequences, 1))
    return Batch(mx.array(tokens), mx.array(mask), ())


BATCHES = [make_batch(6, 9), make_batch(4, 17, seed=1), make_batch(1, 3, seed=2)]


def padded(batch):
    """The same examples with rows and positions that are not trained."""
    tokens, mask = (
        mx.pad(array, [(0, 3), (0, 5)]) for array in (batch.tokens, batch.mask)
    )
    return Batch(tokens, mask, ())


def losses_by_sequence(model, batches):
    """Losses in float64 of the trained tokens of every sequence that has any."""
    sequences = []
    for batch in batches:
        tokens, mask = np.array(batch.tokens), np.array(batch.mask)
        logits = np.array(model.table.astype(mx.float32), np.float64)[tokens[:, :-1]]
        chosen = np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        losses = np.log(np.exp(logits).sum(-1)) - chosen
        sequences += [row[m] for row, m in zip(losses, mask, strict=True) if m.any()]
    return sequences


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_perplexity_equals_numpy(dtype):
    """The error is that of a ratio of sums: sqrt(n / (n - 1) * squared residuals) / N;
    padding changes nothing."""
    model = Table(1)
    model.table = model.table.astype(dtype)
    sequences = losses_by_sequence(model, BATCHES)
    losses, n = np.concatenate(sequences), len(sequences)
    squares = sum((s - losses.mean()).sum() ** 2 for s in sequences)
    stderr = np.exp(losses.mean()) * (n / (n - 1) * squares) ** 0.5 / len(losses)
    for batches in (BATCHES, [padded(batch) for batch in BATCHES]):
        result = measure_perplexity(model, batches)
        assert result.tokens == len(losses)
        assert result.loss == pytest.approx(losses.mean(), rel=1e-6)
        assert result.value == pytest.approx(np.exp(losses.mean()), rel=1e-6)
        assert result.stderr == pytest.approx(stderr, rel=1e-5)


def test_perplexity_stderr_ignores_correlated_tokens():
    """Repeated tokens in a sequence do not reduce the standard error."""
    once = np.random.default_rng(3).integers(0, VOCABULARY, (40, 2))
    mask = np.zeros((40, 15), bool)
    mask[:, ::2] = True
    short = Batch(mx.array(once), mx.ones((40, 1), mx.bool_), ())
    long = Batch(mx.array(np.tile(once, (1, 8))), mx.array(mask), ())
    result = [measure_perplexity(Table(2), [batch]) for batch in (short, long)]
    assert result[1].tokens == 8 * result[0].tokens
    assert result[1].value == pytest.approx(result[0].value, rel=1e-6)
    assert result[1].stderr == pytest.approx(result[0].stderr, rel=1e-5)


def test_perplexity_of_extreme_models():
    uniform = measure_perplexity(Table(0, scale=0.0), BATCHES)
    assert uniform.value == pytest.approx(VOCABULARY, rel=1e-6)
    assert uniform.stderr == pytest.approx(0, abs=1e-5)
    model = Table(0)
    model.table = mx.where(mx.eye(VOCABULARY) > 0, 1e4, 0.0)
    result = measure_perplexity(model, BATCHES)
    assert result.loss > 1000
    assert 1e300 < result.value < float("inf")
    model.table[3, 5] = mx.nan
    with pytest.raises(UserError, match="predictions are NaN") as caught:
        measure_perplexity(model, BATCHES)
    assert caught.value.code == 1


def test_eval_batch_tokens_limits_logits():
    assert eval_batch_tokens(1000) * 1000 * 4 <= 256 << 20
    assert eval_batch_tokens(10**9) == 1


def test_perplexity_ratio_has_the_error_of_the_paired_difference():
    """Compared with a bootstrap over sequences; unpaired errors are far larger."""
    batches = [make_batch(200, 12, seed=5)]
    one, other = Table(1), Table(1)
    other.table = other.table + 0.1 * mx.random.normal(
        other.table.shape, key=mx.random.key(2)
    )
    before, after = (measure_perplexity(model, batches) for model in (one, other))
    ratio, stderr = after.ratio_to(before)
    assert ratio == pytest.approx(after.value / before.value)
    tokens, n = after.sequence_tokens, len(after.sequence_tokens)
    change = after.sequence_losses - before.sequence_losses
    drawn = np.random.default_rng(0).integers(0, n, (2000, n))
    draws = np.exp(change[drawn].sum(1) / tokens[drawn].sum(1))
    assert stderr == pytest.approx(draws.std(), rel=0.1)
    unpaired = np.hypot(before.stderr / before.value, after.stderr / after.value)
    assert stderr < ratio * unpaired / 2
    assert before.ratio_to(before) == (1.0, 0.0)
    # The relative errors of a ratio and of its inverse are equal.
    inverse, error = before.ratio_to(after)
    assert error / inverse == pytest.approx(stderr / ratio)
