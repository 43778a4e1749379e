"""A step compared with finite differences, MLX's AdamW, and other batch splits."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
import pytest
from lmx.data.batching import Batch
from mlx.utils import tree_flatten
from tiny_llamas import llama
from tiny_steps import Tiny, make_step, random_batch

pytestmark = pytest.mark.fused
PATHS = ("embedding.weight", "head.weight", "head.bias")


def gradients(batch, **settings):
    """The (clipped) gradients: with beta1 = 0 they are Adam's first moments."""
    step = make_step(Tiny(), beta1=0.0, **settings)
    loss, tokens, norm = (v.item() for v in step(batch, 1e-3, 0)[:3])
    result = {k: np.array(step.optimizer.state[k]["m"]) for k in PATHS}
    return result, loss, tokens, norm


def numpy_loss(parameters, batch):
    """The loss per trained token, in float64."""
    tokens, mask = np.array(batch.tokens), np.array(batch.mask)
    hidden = np.tanh(parameters["embedding.weight"][tokens[:, :-1]])
    logits = hidden @ parameters["head.weight"].T + parameters["head.bias"]
    chosen = np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    losses = np.log(np.exp(logits).sum(-1)) - chosen
    return (losses * mask).sum() / mask.sum()


def numpy_parameters():
    flat = tree_flatten(Tiny().trainable_parameters())
    return {k: np.array(v, np.float64) for k, v in flat}


def test_step_gradient_equals_finite_differences():
    batch, parameters = random_batch(), numpy_parameters()
    result, loss, tokens, norm = gradients(batch)
    assert tokens == batch.mask.sum().item()
    assert loss / tokens == pytest.approx(numpy_loss(parameters, batch), rel=1e-6)
    squares = 0.0
    for path, values in parameters.items():
        for index in np.ndindex(values.shape):
            before, width = values[index], 1e-5
            values[index] = before + width
            above = numpy_loss(parameters, batch)
            values[index] = before - width
            slope = (above - numpy_loss(parameters, batch)) / (2 * width)
            values[index] = before
            squares += slope**2
            assert result[path][index] == pytest.approx(slope, rel=1e-4, abs=1e-7)
    assert norm == pytest.approx(squares**0.5, rel=1e-5)


def test_sequences_without_trained_tokens_change_nothing():
    batch = random_batch()
    tokens = mx.concatenate([batch.tokens, mx.full((5, 8), 3, mx.int32)])
    mask = mx.concatenate([batch.mask, mx.zeros((5, 7), mx.bool_)])
    result, *metrics = gradients(Batch(tokens, mask, batch.where))
    expected, *expected_metrics = gradients(batch)
    assert metrics == pytest.approx(expected_metrics, rel=1e-6)
    for path in PATHS:
        np.testing.assert_allclose(result[path], expected[path], rtol=1e-5, atol=1e-7)


def test_evaluation_weighs_tokens_equally():
    """Sequences with many and few trained tokens: no mean of means."""
    batch = random_batch(2)
    step = make_step(Tiny())
    sequences = [
        Batch(batch.tokens[i : i + 1], batch.mask[i : i + 1], batch.where[i : i + 1])
        for i in (0, 1)
    ]
    assert len({sequence.mask.sum().item() for sequence in sequences}) == 2
    whole, cut = step.evaluate([batch]), step.evaluate(sequences)
    assert whole[:2] == pytest.approx(cut[:2], rel=1e-6)
    exact = numpy_loss(numpy_parameters(), batch)
    assert whole[0] / whole[1] == pytest.approx(exact, rel=1e-6)


def test_step_clips_the_joint_norm():
    free, *_, norm = gradients(random_batch())
    limit = norm / 3
    clipped, *_, reported = gradients(random_batch(), max_grad_norm=limit)
    joint = sum((v.astype(np.float64) ** 2).sum() for v in clipped.values()) ** 0.5
    assert joint == pytest.approx(limit, rel=1e-5)
    assert reported == pytest.approx(norm)
    for path in PATHS:
        np.testing.assert_allclose(clipped[path], free[path] / 3, rtol=1e-4, atol=1e-8)


def train(step, rates):
    for number, rate in enumerate(rates):
        mx.eval(step(random_batch(seed=number), rate, number), step.parameters)
    return step.parameters


def reference(optimizer, rates, **model):
    """The same training with MLX's optimizer, uncompiled."""
    model = Tiny(**model)

    def loss(batch):
        logits = model(batch.tokens[:, :-1])
        losses = nn.losses.cross_entropy(logits, batch.tokens[:, 1:])
        return (losses * batch.mask).sum() / batch.mask.sum()

    for number, rate in enumerate(rates):
        optimizer.learning_rate = rate
        batch = random_batch(seed=number)
        _, result = nn.value_and_grad(model, loss)(batch)
        optimizer.update(model, result)
    return dict(tree_flatten(model.parameters()))


RATES = (1e-2, 3e-2, 2e-2, 1e-2)


def test_step_equals_adamw_of_mlx():
    adamw = optimizers.AdamW(0.0, [0.9, 0.95], weight_decay=0.1, bias_correction=True)
    expected = reference(adamw, RATES, bias=False)
    result = train(make_step(Tiny(bias=False), weight_decay=0.1), RATES)
    assert result.keys() == expected.keys()
    for path in result:
        np.testing.assert_allclose(result[path], expected[path], rtol=1e-4, atol=1e-5)


def test_step_does_not_decay_vectors():
    settings = {"learning_rate": 0.0, "betas": [0.9, 0.95], "bias_correction": True}
    adam = reference(optimizers.Adam(**settings), RATES[:1])
    adamw = reference(optimizers.AdamW(weight_decay=1.0, **settings), RATES[:1])
    result = train(make_step(Tiny(), weight_decay=1.0), RATES[:1])
    np.testing.assert_allclose(result["head.bias"], adam["head.bias"], rtol=1e-5)
    np.testing.assert_allclose(result["head.weight"], adamw["head.weight"], rtol=1e-5)
    assert not np.allclose(adam["head.bias"], adamw["head.bias"], rtol=1e-5)


def test_master_weights_are_float32():
    step = make_step(Tiny(), compute_dtype=mx.bfloat16)
    # Far below half a bfloat16 ulp: only float32 master weights accumulate these.
    result = train(step, [1e-6] * 3)
    start = Tiny().head.weight
    assert all(v.dtype == mx.float32 for v in result.values())
    assert not mx.array_equal(result["head.weight"], start)
    same = mx.array_equal(
        result["head.weight"].astype(mx.bfloat16), start.astype(mx.bfloat16)
    )
    assert same
    assert step.materialize().head.weight.dtype == mx.bfloat16


def test_dropout_depends_only_on_the_seed():
    def losses(seeds):
        step = make_step(Tiny(dropout=0.5))
        return [step(random_batch(), 0.0, seed)[0].item() for seed in seeds]

    first, again, other = losses([7, 7, 8])
    assert first == again != other
    assert losses([8])[0] == other


def test_evaluation_has_no_dropout():
    step, plain = make_step(Tiny(dropout=0.5)), make_step(Tiny())
    step(random_batch(), 0.0, 0)
    assert step.evaluate([random_batch()]) == plain.evaluate([random_batch()])


def test_lr_multipliers_scale_updates():
    """LoRA+: the update, with weight decay, of three times the learning rate."""
    start = dict(tree_flatten(Tiny().parameters()))
    moved = {}
    for factor in (1.0, 3.0):
        multipliers = {"head.weight": factor}
        step = make_step(Tiny(), weight_decay=0.1, lr_multipliers=multipliers)
        step(random_batch(), 1e-2, 0)
        moved[factor] = {k: v - start[k] for k, v in step.parameters.items()}
    for path in PATHS:
        expected = moved[1.0][path] * (3.0 if path == "head.weight" else 1.0)
        assert mx.abs(expected).max() > 5e-3
        assert mx.allclose(moved[3.0][path], expected, rtol=1e-4, atol=1e-6)


def test_batch_without_trained_tokens_has_no_nan():
    batch, step = random_batch(), make_step(Tiny())
    before = dict(step.parameters)
    nothing = Batch(batch.tokens, mx.zeros_like(batch.mask), ())
    assert [v.item() for v in step(nothing, 1e-2, 0)[:4]] == [0.0, 1.0, 0.0, 0.0]
    assert all(mx.array_equal(v, before[k]) for k, v in step.parameters.items())


def test_full_fine_tuning_trains_embeddings_norm_and_head():
    model, _ = llama(tie_word_embeddings=False)
    everything = dict(tree_flatten(model.parameters()))
    assert make_step(model).parameters.keys() == everything.keys()
