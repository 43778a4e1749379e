"""GPTQ has a lower divergence than RTN and logs its errors."""

from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from lmx.config import quantize
from lmx.config.quantize import GPTQConfig, RTNConfig
from lmx.interfaces import Logger
from lmx.quantization.packing import dequantize
from lmx.quantization.ptq.methods import METHODS
from lmx.quantization.target_layers import select_layers
from mlx.utils import tree_flatten, tree_unflatten
from quantization_samples import context_of, enlarged_model, tensors_of, windows_of
from tiny_checkpoints import LLAMA, QWEN3_MOE

SIZES = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 192}


def model_of(config=LLAMA, **changes):
    return enlarged_model(config | changes)


CONFIGS = {"gptq": GPTQConfig, "rtn": RTNConfig}


def tokens_of(seed, count=96):
    """Return tokens with uneven frequencies, as in text."""
    share = mx.random.uniform(shape=(count, 32), key=mx.random.key(seed))
    return (320 * share**3).astype(mx.int32)


class RecordingLogger(Logger):
    def __init__(self):
        super().__init__()
        self.lines = []
        self.info = self.warning = self.debug = self.lines.append


def quantized(
    method, model, folder, *, tokens=None, counted=None, logger=None, **settings
):
    """Return tensors and the model with the dequantized weights."""
    config = CONFIGS[method](**settings)
    specs = select_layers(model, config).specs
    dense = dict(tree_flatten(model.parameters()))
    windows = windows_of(tokens_of(1) if tokens is None else tokens, counted)
    logger = logger or RecordingLogger()
    context = context_of(model, specs, windows, folder, logger=logger)
    tensors = METHODS[method](config, context).quantize()
    for path, spec in specs.items():
        packed = tensors_of(tensors, path)
        dense[f"{path}.weight"] = dequantize(packed, spec, mx.float32)
    model.update(tree_unflatten(list(dense.items())))
    return tensors, model


def divergence(model, quantized_model):
    """Return the mean KL divergence on tokens outside the calibration set."""
    tokens = tokens_of(2)
    p, q = (m(tokens).astype(mx.float32) for m in (model, quantized_model))
    p, q = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (p, q))
    return (mx.exp(p) * (p - q)).sum(axis=-1).mean().item()


@pytest.fixture(scope="module")
def gptq_models(tmp_path_factory):
    """A cached function: (bits, tied) -> quantized model and logger."""

    @cache
    def get_model(bits, tied):
        logger, folder = RecordingLogger(), tmp_path_factory.mktemp("gptq")
        model = model_of(**SIZES, tie_word_embeddings=tied)
        return quantized("gptq", model, folder, bits=bits, logger=logger)[1], logger

    return get_model


# The cases vary bits and tied embeddings independently.
@pytest.mark.parametrize(("bits", "tied"), [(2, True), (3, False)])
def test_gptq_divergence_is_below_rtn(tmp_path, gptq_models, bits, tied):
    changes = SIZES | {"tie_word_embeddings": tied}
    model = model_of(**changes)
    _, rtn = quantized("rtn", model_of(**changes), tmp_path, bits=bits)
    models = {"rtn": rtn, "gptq": gptq_models(bits, tied)[0]}
    kl = {
        method: divergence(model, quantized_model)
        for method, quantized_model in models.items()
    }
    assert 0 < kl["gptq"] < 0.8 * kl["rtn"]


def test_every_option_reduces_the_divergence(tmp_path):
    model = model_of(**SIZES)
    # The embedding has larger errors than the layers under test.
    settings = {"bits": 3, "overrides": {"model.embed_tokens": "skip"}}

    def loss(name, **changes):
        _, quantized_model = quantized(
            "gptq", model_of(**SIZES), tmp_path / name, **settings, **changes
        )
        return divergence(model, quantized_model)

    full = loss("full")
    assert full < loss("single pass", refine_iters=0, asymmetric_calibration=False)
    assert full < 0.95 * loss("independent rows", output_hessian=False)


def test_padding_does_not_change_the_result(tmp_path):
    """Tokens after the last counted position have no effect."""
    rng, tokens = np.random.default_rng(0), np.array(tokens_of(1))
    counted = np.zeros(tokens.shape, bool)
    ends = rng.integers(8, 31, len(tokens))
    for position_mask, end in zip(counted, ends, strict=True):
        position_mask[end - 4 : end] = True
    sizes = SIZES | {"hidden_size": 64, "num_hidden_layers": 1}
    results = []
    for number in range(2):
        is_padding = np.arange(32) >= ends[:, None]
        padded = np.where(is_padding, rng.integers(0, 320, tokens.shape), tokens)
        settings = {"tokens": mx.array(padded), "counted": counted}
        settings |= {"bits": 3, "refine_iters": 1}
        folder = tmp_path / str(number)
        results.append(quantized("gptq", model_of(**sizes), folder, **settings)[0])
    assert all(mx.array_equal(results[0][k], results[1][k]).item() for k in results[0])


def test_experts_with_few_tokens_are_logged(tmp_path):
    logger = RecordingLogger()
    tokens = tokens_of(1, count=2)
    model = model_of(QWEN3_MOE, num_hidden_layers=1)
    quantized("gptq", model, tmp_path, tokens=tokens, logger=logger)
    assert any("experts received fewer than" in line for line in logger.lines)
    assert any("calibration has 64 tokens" in line for line in logger.lines)


def test_output_errors_are_logged(gptq_models):
    _, logger = gptq_models(2, True)
    lines = [line for line in logger.lines if "relative output error" in line]
    clusters = [line for line in lines if "embed_tokens, cluster" in line]
    assert len(clusters) > 1
    assert len(lines) == 2 * 7 + len(clusters)
    assert all("RTN" in line and "best" in line for line in lines)


def test_options_without_token_weights_refuse_completions():
    calibration = {"loss_on": "completions"}
    quantize.GPTQConfig(calibration=calibration)
    mixed = {"target_bpw": 3}
    with pytest.raises(ValueError, match="mixed_precision weights all tokens equally"):
        quantize.GPTQConfig(calibration=calibration, mixed_precision=mixed)


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4"])
def test_gptq_divergence_is_below_rtn_in_floating_point_modes(tmp_path, mode):
    """The embedding is fitted too; it has no Hessian of its inputs."""
    changes = SIZES | {"num_hidden_layers": 1, "tie_word_embeddings": True}
    rtn, gptq = (
        quantized(method, model_of(**changes), tmp_path / method, mode=mode)[1]
        for method in ("rtn", "gptq")
    )
    model = model_of(**changes)
    assert 0 < divergence(model, gptq) < 0.7 * divergence(model, rtn)
