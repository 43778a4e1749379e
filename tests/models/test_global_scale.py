"""Experts with a global scale: mlx-lm's own checkpoints of them, on a CPU."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.cpu import keep_dequantized
from lmx.cpu.quantized_matmul import kept_weight
from lmx.evaluation.weight_error import measure_layers
from lmx.models import global_scale
from lmx.models.checkpoint import checkpoint_size
from lmx.models.loader import load
from lmx.quantization.packing import layer_specs
from tiny_global_scale import GRID, UP, dequantized, write_checkpoints

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TOKENS = mx.random.randint(0, 320, (2, 12), key=mx.random.key(0))
EXPERTS = 0.01 * mx.random.normal((3, 24, 96), key=mx.random.key(1))


@pytest.fixture(scope="module")
def checkpoints(make_checkpoint, tmp_path_factory):
    return write_checkpoints(make_checkpoint, tmp_path_factory.mktemp("scaled"))


def layer_of(folder, **settings):
    return load(folder, **settings).model.layers[0].mlp.switch_mlp.up_proj


def by_definition(codes, scales, scale):
    """The weight [N, K] of an expert in float64."""
    pairs = np.array(codes).view(np.uint8)
    nibbles = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(codes), -1)
    elements = np.where(nibbles & 8, -1, 1) * MAGNITUDES[nibbles & 7]
    bits = np.array(scales).astype(int)
    exponent, fraction = bits >> 3, bits & 7
    lead = (exponent > 0) + fraction / 8
    groups = lead * 2.0 ** (np.maximum(exponent, 1) - 7) * scale / (6 * 448)
    return elements * np.repeat(groups, 16, axis=-1)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_quantize_and_dequantize_are_those_of_mlx(dtype):
    """Bit for bit, with an expert of zeros; and close to the definition in float64."""
    weight = EXPERTS.astype(dtype)
    weight[1] = 0
    packed = global_scale.quantize(weight)
    assert packed["global_scale"].dtype == mx.float32
    for number, expert in enumerate(weight):
        scale = mx.abs(expert).max().astype(mx.float32)
        codes, scales = mx.quantize(expert, global_scale=scale, **GRID)
        for name, value in zip(("weight", "scales"), (codes, scales), strict=True):
            assert mx.array_equal(packed[name][number], value), name
        assert packed["global_scale"][number] == scale
    named = {f".{name}": value for name, value in packed.items()}
    served = global_scale.dequantize(*packed.values())
    assert mx.array_equal(served, dequantized(named, ""))
    for number in (0, 2):
        parts = [packed[k][number] for k in ("weight", "scales", "global_scale")]
        exact = by_definition(*parts[:2], parts[2].item())
        np.testing.assert_allclose(served[number], exact, rtol=1e-6)


def test_small_weights_need_the_global_scale():
    """Negative control of the whole feature: without it, the error is larger."""
    errors = []
    plain = mx.quantize(EXPERTS, **GRID)
    served = global_scale.dequantize(*global_scale.quantize(EXPERTS).values())
    for weight in (served, mx.dequantize(*plain, dtype=mx.float32, **GRID)):
        errors.append(mx.square(weight - EXPERTS).sum().item())
    assert errors[0] < 0.7 * errors[1]


def test_checkpoint_of_mlx_lm_computes_its_dequantized_weights(checkpoints):
    _, dense, codes = checkpoints
    loaded = load(codes)
    layer = loaded.model.layers[0].mlp.switch_mlp.up_proj
    assert layer_specs(loaded.model)[UP].global_scale
    assert not layer_specs(loaded.model)["lm_head"].global_scale
    expected = load(dense).model
    # One token has fewer products than there are experts; 64 products are sorted.
    for tokens in (TOKENS[:1, :1], TOKENS[:1], mx.tile(TOKENS, (2, 3))):
        logits = expected(tokens)
        assert mx.abs(loaded.model(tokens) - logits).max() < 1e-5
    layer.global_scale = mx.full((4,), 2688.0)
    ignored = loaded.model(TOKENS)
    assert mx.abs(ignored - expected(TOKENS)).max() > 1e-2


def test_kept_weights_give_the_same_logits(checkpoints):
    _, dense, codes = checkpoints
    model = load(codes).model
    logits = model(TOKENS)
    if keep_dequantized(model):
        weight = layer_of(dense).weight
        kept = kept_weight(model.layers[0].mlp.switch_mlp.up_proj)
        assert mx.array_equal(kept, weight)
        assert mx.abs(model(TOKENS) - logits).max() < 1e-5


def test_gradients_pass_through_the_experts(checkpoints):
    _, dense, codes = checkpoints
    x = mx.random.normal((1, 5, 1, 1, 128), key=mx.random.key(3))
    for indices in (mx.array([[[0, 3]]]), mx.array([[[0, 1], [2, 3], [0, 0]]])):
        inputs = x[:, : indices.shape[1]]
        gradients = []
        for folder in (dense, codes):
            layer = layer_of(folder)

            def loss(inputs, layer=layer, indices=indices):
                return mx.square(layer(inputs, indices)).sum()

            gradients.append(mx.compile(mx.grad(loss))(inputs))
        assert mx.abs(gradients[0]).max() > 0
        np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_global_scale_stays_in_float32(checkpoints, compute):
    """MLX takes no other type, and bfloat16 would round it."""
    layer = layer_of(checkpoints[2], compute=compute)
    stored = mx.load(str(checkpoints[2] / "model.safetensors"))[f"{UP}.global_scale"]
    assert layer.global_scale.dtype == mx.float32
    assert mx.array_equal(layer.global_scale, stored)


def test_bits_and_errors_of_layers_are_known(checkpoints):
    base, dense, codes = checkpoints
    layers = measure_layers(load(base), load(codes))
    tensors = mx.load(str(codes / "model.safetensors"))
    weight = mx.load(str(base / "model.safetensors"))[f"{UP}.weight"]
    moved = dequantized(tensors, UP)
    error = (mx.square(moved - weight).sum() / mx.square(weight).sum()).item()
    assert layers[UP]["error"] == pytest.approx(error, rel=1e-4)
    assert 0.005 < error < 0.02
    sizes = [checkpoint_size(folder) for folder in (dense, codes)]
    assert sizes[0].parameters == sizes[1].parameters
    assert sizes[1].bytes == sum(value.nbytes for value in tensors.values())
