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


def token_losses(model, batch):
    """Negative log-likelihoods [B, L] in float64."""
    tokens = np.array(batch.tokens)
    logits = np.array(model.table, np.float64)[tokens[:, :-1]]
    chosen = np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return np.log(np.exp(logits).sum(-1)) - chosen


def losses_by_sequence(model, batches):
    """Losses of the trained tokens of every sequence that has any."""
    sequences = [
        losses[mask]
        for batch in batches
        for losses, mask in zip(
            token_losses(model, batch), np.array(batch.mask), strict=True
        )
    ]
    return [sequence for sequence in sequences if len(sequence)]


BATCHES = [make_batch(6, 9), make_batch(4, 17, seed=1), make_batch(1, 3, seed=2)]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_perplexity_equals_numpy(dtype):
    model = Table(0)
    model.table = model.table.astype(dtype).astype(mx.float32)
    stored = Table(0)
    stored.table = model.table.astype(dtype)
    result = measure_perplexity(stored, BATCHES)
    losses = np.concatenate(losses_by_sequence(model, BATCHES))
    assert result.tokens == len(losses)
    assert result.loss == pytest.approx(losses.mean(), rel=1e-6)
    assert result.value == pytest.approx(np.exp(losses.mean()), rel=1e-6)


def test_perplexity_stderr_is_clustered():
    """The ratio estimator: sqrt(n / (n - 1) * sum of squared residuals) / N."""
    model = Table(1)
    result = measure_perplexity(model, BATCHES)
    sequences = losses_by_sequence(model, BATCHES)
    mean, n = np.concatenate(sequences).mean(), len(sequences)
    squares = sum(sum(loss - mean for loss in sequence) ** 2 for sequence in sequences)
    total = sum(map(len, sequences))
    expected = (n / (n - 1) * squares) ** 0.5 / total * np.exp(mean)
    assert result.stderr == pytest.approx(expected, rel=1e-5)


def test_perplexity_stderr_equals_bootstrap():
    model, batches = Table(1), [make_batch(400, 12, seed=5)]
    result = measure_perplexity(model, batches)
    sequences = losses_by_sequence(model, batches)
    sums, counts = (np.array([f(r) for r in sequences]) for f in (np.sum, len))
    drawn = np.random.default_rng(0).integers(0, len(sequences), (2000, len(sequences)))
    values = np.exp(sums[drawn].sum(1) / counts[drawn].sum(1))
    assert result.stderr == pytest.approx(values.std(), rel=0.1)


def test_perplexity_stderr_ignores_correlated_tokens():
    """Repeated tokens in a sequence do not reduce the standard error."""
    generator = np.random.default_rng(3)
    once = generator.integers(0, VOCABULARY, (40, 2))
    often = np.tile(once, (1, 8))
    mask = np.zeros((40, 15), bool)
    mask[:, ::2] = True
    short = Batch(mx.array(once), mx.ones((40, 1), mx.bool_), ())
    long = Batch(mx.array(often), mx.array(mask), ())
    model = Table(2)
    result = [measure_perplexity(model, [batch]) for batch in (short, long)]
    assert result[1].tokens == 8 * result[0].tokens
    assert result[1].value == pytest.approx(result[0].value, rel=1e-6)
    assert result[1].stderr == pytest.approx(result[0].stderr, rel=1e-5)


def test_perplexity_of_a_uniform_model_is_its_vocab_size():
    result = measure_perplexity(Table(0, scale=0.0), BATCHES)
    assert result.value == pytest.approx(VOCABULARY, rel=1e-6)
    assert result.stderr == pytest.approx(0, abs=1e-5)


def test_perplexity_ignores_padding():
    model, batch = Table(0), BATCHES[0]
    tokens = mx.pad(batch.tokens, [(0, 3), (0, 5)])
    mask = mx.pad(batch.mask, [(0, 3), (0, 5)])
    padded = measure_perplexity(model, [Batch(tokens, mask, ())])
    plain = measure_perplexity(model, [batch])
    for name in ("value", "stderr", "loss", "tokens"):
        assert getattr(padded, name) == pytest.approx(getattr(plain, name), rel=1e-6)


def test_perplexity_of_a_huge_loss_is_finite():
    model = Table(0)
    model.table = mx.where(mx.eye(VOCABULARY) > 0, 1e4, 0.0)
    result = measure_perplexity(model, BATCHES)
    assert result.loss > 1000
    assert 1e300 < result.value < float("inf")


def test_perplexity_refuses_nan():
    model = Table(0)
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
    generator, draws = np.random.default_rng(0), []
    tokens = after.sequence_tokens
    change = after.sequence_losses - before.sequence_losses
    for _ in range(2000):
        chosen = generator.integers(0, len(tokens), len(tokens))
        draws.append(np.exp(change[chosen].sum() / tokens[chosen].sum()))
    assert stderr == pytest.approx(np.std(draws), rel=0.1)
    unpaired = ratio * np.hypot(
        before.stderr / before.value, after.stderr / after.value
    )
    assert stderr < unpaired / 2
    assert before.ratio_to(before) == (1.0, 0.0)
