"""How the loss answers to the outputs of layers, against the whole model's slopes."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.models.blockwise import BlockwiseModel
from lmx.models.hooks import GradientTap, hook_calls
from lmx.models.loader import build_model
from lmx.quantization.ptq import output_fisher
from lmx.quantization.ptq.input_statistics import sampled_label_loss
from lmx.quantization.ptq.output_fisher import (
    backward_sensitivity_pass,
    output_hessians,
    squares,
)
from mlx.utils import tree_map
from tiny_checkpoints import LLAMA, QWEN3_MOE

TOKENS = mx.random.randint(0, 320, (5, 24), key=mx.random.key(0))
INSIDE = ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"]


def model_of(config=LLAMA):
    mx.random.seed(5)
    model = build_model(config | {"vocab_size": 320, "num_hidden_layers": 2})
    model.update(tree_map(lambda v: 2 * v if v.ndim > 1 else v, model.parameters()))
    return model.eval()


def looked(model, folder, inside, rows=2, counted=None):
    counted = mx.ones(TOKENS.shape, mx.bool_) if counted is None else counted
    starts = range(0, len(TOKENS), rows)
    parts = [TOKENS[start : start + rows] for start in starts]
    counted = [counted[start : start + rows] for start in starts]
    model = BlockwiseModel(model)
    given = {"compute": mx.float32, "folder": folder}
    backward_sensitivity_pass(model, [], [inside] * len(model), parts, counted, **given)
    return [output_hessians(folder, number) for number in range(len(model))]


def slopes_of(model, path, rows, counted=None):
    """The slopes of every row by what comes out of a layer, of the whole model."""
    call, found = f"{path}:0", []
    first = GradientTap()
    with hook_calls(model, [path], first):
        model(rows[:1])
    for key, row in enumerate(rows):

        def loss(shift, row=row, key=key):
            own = None if counted is None else counted[key][None]
            with hook_calls(model, [path], GradientTap({call: shift})):
                return sampled_label_loss(model(row[None]), mx.random.key(key), own)

        slopes = mx.grad(loss)(mx.zeros_like(first.outputs[call]))
        found.append(np.array(slopes, np.float64).reshape(-1, slopes.shape[-1]))
    return np.concatenate(found)


def information(model, path, rows):
    """Second moments of the slopes."""
    slopes = slopes_of(model, path, rows)
    return slopes.T @ slopes / len(slopes)


def test_block_by_block_comes_what_the_whole_model_gives(tmp_path):
    model = model_of()
    found = looked(model, tmp_path, INSIDE)
    assert [set(own) for own in found] == [set(INSIDE)] * len(found)
    for number, own in enumerate(found):
        for path, value in own.items():
            expected = information(model, f"model.layers.{number}.{path}", TOKENS)
            largest = np.abs(expected).max()
            np.testing.assert_allclose(value, expected, atol=2e-4 * largest)
    assert not model.training


# 128 outputs want 38 tokens: the first part of two windows of 24.
@pytest.mark.parametrize("limit", [("TOKENS_PER_OUTPUT", 0.3), ("MOST_TOKENS", 38)])
def test_few_tokens_are_enough(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(output_fisher, *limit)
    model = model_of()
    path = "self_attn.o_proj"
    value = looked(model, tmp_path, [path])[0][path]
    expected = information(model, f"model.layers.0.{path}", TOKENS[:2])
    np.testing.assert_allclose(value, expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize("limit", [("MOST_OUTPUTS", 128), ("MOST_TIMES", 1)])
def test_wide_layers_and_experts_are_left_out(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(output_fisher, *limit)
    paths = ["self_attn.o_proj", "mlp.up_proj"]
    assert [set(own) for own in looked(model_of(), tmp_path, paths)] == [{paths[0]}] * 2
    paths = ["self_attn.o_proj", "mlp.switch_mlp.up_proj"]
    (tmp_path / "experts").mkdir()
    found = looked(model_of(QWEN3_MOE), tmp_path / "experts", paths)
    assert [set(own) for own in found] == [{paths[0]}] * len(found)


@pytest.mark.parametrize("inside", [[], ["mlp.up_proj"]])
def test_nothing_asked_is_nothing_run(tmp_path, monkeypatch, inside):
    monkeypatch.setattr(output_fisher, "MOST_OUTPUTS", 1)
    monkeypatch.setattr(output_fisher, "ForwardBackwardPass", None)
    assert looked(model_of(), tmp_path, inside) == [{}, {}]
    assert not list(tmp_path.iterdir())


def test_only_what_counts_sends_slopes_back(tmp_path, monkeypatch):
    """Also of layers that are too wide to be looked at together."""
    monkeypatch.setattr(output_fisher, "MOST_TIMES", 1)
    counted = mx.random.bernoulli(0.4, TOKENS.shape, key=mx.random.key(1))
    model, paths = model_of(), ["self_attn.o_proj", "mlp.up_proj"]
    found = looked(model, tmp_path, paths, counted=counted)
    for number, own in enumerate(found):
        assert set(own) == {paths[0]}
        lengths = squares(tmp_path, number)
        assert set(lengths) == set(paths)
        for path in paths:
            whole = f"model.layers.{number}.{path}"
            slopes = slopes_of(model, whole, TOKENS, counted)
            expected = np.square(slopes).sum(axis=1)
            np.testing.assert_allclose(
                lengths[path], expected, atol=2e-4 * expected.max()
            )
            if path in own:
                expected = slopes.T @ slopes / counted.sum().item()
                largest = np.abs(expected).max()
                np.testing.assert_allclose(own[path], expected, atol=2e-4 * largest)


def test_where_all_tokens_count_nothing_is_kept_of_each(tmp_path):
    looked(model_of(), tmp_path, INSIDE)
    assert squares(tmp_path, 0) == {}
