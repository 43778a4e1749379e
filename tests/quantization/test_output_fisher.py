"""Output Fisher information compared with gradients of the full model."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.interfaces import Logger
from lmx.models.blockwise import BlockwiseModel
from lmx.models.hooks import GradientTap, hook_calls
from lmx.quantization.ptq import output_fisher as module
from lmx.quantization.ptq.fisher import (
    sample_labels,
    sampled_label_loss,
    visible_positions,
)
from lmx.quantization.ptq.output_fisher import (
    OWN_WEIGHT,
    estimate_output_fisher,
    gradient_norms,
    output_fisher,
    token_weights,
)
from quantization_samples import enlarged_model
from tiny_checkpoints import LLAMA, QWEN3_MOE

TOKENS = mx.random.randint(0, 320, (5, 24), key=mx.random.key(0))
PATHS = ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"]

COUNTED = mx.array([[0, 1, 1, 0], [0, 0, 1, 0], [1, 0, 0, 0]]).astype(mx.bool_)
VISIBLE = np.array([[1, 1, 1, 0], [1, 1, 1, 0], [1, 0, 0, 0]], bool)
SHARDS = [COUNTED[:2], COUNTED[2:]]


def model_of(config=LLAMA):
    return enlarged_model(config | {"vocab_size": 320, "num_hidden_layers": 2})


def estimate(model, folder, paths, shard_size=2, counted=None, max_tokens=4096):
    """Return the Fisher information of the layers at `paths` of every block."""
    counted = mx.ones(TOKENS.shape, mx.bool_) if counted is None else counted
    starts = range(0, len(TOKENS), shard_size)
    tokens = [TOKENS[start : start + shard_size] for start in starts]
    counted = [counted[start : start + shard_size] for start in starts]
    model = BlockwiseModel(model)
    estimate_output_fisher(
        model,
        [],
        [paths] * len(model),
        tokens,
        counted,
        compute=mx.float32,
        folder=folder,
        max_tokens=max_tokens,
        logger=Logger(),
    )
    return [output_fisher(folder, index) for index in range(len(model))]


def test_sampled_labels_have_the_predicted_probabilities():
    logits = mx.array([2.0, -40.0, 0.5, 1.0, -1.0, 0.0])
    count = 40_000
    rows = mx.broadcast_to(logits, (count, 6))
    labels = np.array(sample_labels(rows, mx.random.key(3)))
    expected = np.array(mx.softmax(logits), np.float64)
    observed = np.bincount(labels, minlength=6) / count
    error = np.sqrt(expected * (1 - expected) / count)
    assert np.all(np.abs(observed - expected) <= 4 * error + 1e-9)
    # One label off would be seen.
    assert np.any(np.abs(np.roll(observed, 1) - expected) > 40 * error)
    last = sample_labels(mx.array([[-1e9, -1e9, 0.0]] * 100), mx.random.key(0))
    assert mx.all(last == 2)


def gradients_of(model, path, sequences, counted=None):
    """Return gradients with respect to a layer output, sequence by sequence."""
    call, gradients = f"{path}:0", []
    tap = GradientTap()
    with hook_calls(model, [path], tap):
        model(sequences[:1])
    for key, sequence in enumerate(sequences):

        def loss(shift, sequence=sequence, key=key):
            mask = None if counted is None else counted[key][None]
            with hook_calls(model, [path], GradientTap({call: shift})):
                return sampled_label_loss(
                    model(sequence[None]), mx.random.key(key), mask
                )

        gradient = mx.grad(loss)(mx.zeros_like(tap.outputs[call]))
        gradients.append(np.array(gradient, np.float64).reshape(-1, gradient.shape[-1]))
    return np.concatenate(gradients)


def expected_fisher(model, path, sequences):
    gradients = gradients_of(model, path, sequences)
    return gradients.T @ gradients / len(gradients)


def test_fisher_matches_the_whole_model(tmp_path):
    model = model_of()
    fisher = estimate(model, tmp_path, PATHS)
    assert [set(by_path) for by_path in fisher] == [set(PATHS)] * len(fisher)
    for index, by_path in enumerate(fisher):
        for path, value in by_path.items():
            expected = expected_fisher(model, f"model.layers.{index}.{path}", TOKENS)
            largest = np.abs(expected).max()
            np.testing.assert_allclose(value, expected, atol=2e-4 * largest)
    assert not model.training
    assert gradient_norms(tmp_path, 0) == {}, "all positions count"
    assert token_weights(mx.ones(12), [mx.ones((3, 4), mx.bool_)]) is None


# 128 outputs need 38 tokens: the first shard of two sequences of 24.
@pytest.mark.parametrize(("per_output", "max_tokens"), [(0.3, 4096), (8, 38)])
def test_fisher_uses_as_many_tokens_as_needed(
    per_output, max_tokens, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "TOKENS_PER_OUTPUT", per_output)
    model = model_of()
    path = "self_attn.o_proj"
    value = estimate(model, tmp_path, [path], max_tokens=max_tokens)[0][path]
    expected = expected_fisher(model, f"model.layers.0.{path}", TOKENS[:2])
    np.testing.assert_allclose(value, expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize("limit", [("MAX_OUTPUTS", 128), ("MAX_OUTPUT_RATIO", 1)])
def test_fisher_skips_wide_layers_and_experts(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(module, *limit)
    paths = ["self_attn.o_proj", "mlp.up_proj"]
    fisher = estimate(model_of(), tmp_path, paths)
    assert [set(by_path) for by_path in fisher] == [{paths[0]}] * 2
    paths = ["self_attn.o_proj", "mlp.switch_mlp.up_proj"]
    (tmp_path / "experts").mkdir()
    fisher = estimate(model_of(QWEN3_MOE), tmp_path / "experts", paths)
    assert [set(by_path) for by_path in fisher] == [{paths[0]}] * len(fisher)


@pytest.mark.parametrize("paths", [[], ["mlp.up_proj"]])
def test_fisher_without_layers_runs_no_pass(tmp_path, monkeypatch, paths):
    monkeypatch.setattr(module, "MAX_OUTPUTS", 1)
    monkeypatch.setattr(module, "ForwardBackwardPass", None)
    assert estimate(model_of(), tmp_path, paths) == [{}, {}]
    assert not list(tmp_path.iterdir())


def test_only_counted_positions_have_gradients(tmp_path, monkeypatch):
    """Layers that are too wide for Fisher information have gradient norms as well."""
    monkeypatch.setattr(module, "MAX_OUTPUT_RATIO", 1)
    counted = mx.random.bernoulli(0.4, TOKENS.shape, key=mx.random.key(1))
    model, paths = model_of(), ["self_attn.o_proj", "mlp.up_proj"]
    fisher = estimate(model, tmp_path, paths, counted=counted)
    for index, by_path in enumerate(fisher):
        assert set(by_path) == {paths[0]}
        norms = gradient_norms(tmp_path, index)
        assert set(norms) == set(paths)
        for path in paths:
            full_path = f"model.layers.{index}.{path}"
            gradients = gradients_of(model, full_path, TOKENS, counted)
            expected = np.square(gradients).sum(axis=1)
            np.testing.assert_allclose(
                norms[path], expected, atol=2e-4 * expected.max()
            )
            if path in by_path:
                expected = gradients.T @ gradients / counted.sum().item()
                largest = np.abs(expected).max()
                np.testing.assert_allclose(by_path[path], expected, atol=2e-4 * largest)


def test_token_weights_without_gradients_are_equal():
    assert np.array_equal(visible_positions(COUNTED), VISIBLE)
    weights = token_weights(None, SHARDS)
    assert [shard.shape for shard in weights] == [(8,), (4,)]
    assert np.array_equal(np.concatenate(weights), VISIBLE.reshape(-1))


def test_token_weights_average_the_norm_and_the_mean():
    norms = np.array([2, 6, 10, 0, 1, 3, 8, 0], np.float64)
    weights = np.concatenate(token_weights(mx.array(norms, mx.float32), SHARDS))
    counted, visible = np.array(COUNTED).reshape(-1), VISIBLE.reshape(-1)
    # Tokens of the last sequence have no gradients and use the mean of their kind.
    means = np.where(counted, (6 + 10 + 8) / 3, np.where(visible, (2 + 1 + 3) / 3, 0))
    expected = means.copy()
    expected[:8] = (1 - OWN_WEIGHT) * means[:8] + OWN_WEIGHT * norms
    expected *= visible.sum() / expected.sum()
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert weights.sum() == pytest.approx(visible.sum())
