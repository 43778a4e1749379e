"""Quantizing experts with a global scale, as mlx-lm stores and loads them."""

import json

import mlx.core as mx
import mlx_lm
import pytest
from lmx.config.qat import QATConfig
from lmx.config.quant_spec import QuantizationConfig, QuantSpec
from lmx.errors import UserError
from lmx.models.loader import build_model, load
from lmx.quantization.packing import dequantize, pack, packed_bytes
from lmx.quantization.qat.quantizers import make_quantizer
from lmx.quantization.target_layers import select_layers
from mlx.utils import tree_flatten
from pydantic import ValidationError
from tiny_checkpoints import LLAMA, QWEN3_MOE
from tiny_global_scale import UP, write_checkpoints

GRID = {"mode": "nvfp4", "global_scale": True}
SPEC, PLAIN = QuantSpec(**GRID), QuantSpec(mode="nvfp4")
MAGNITUDES = mx.array([0.3, 0.02, 0.001, 0.0])[:, None, None]
EXPERTS = MAGNITUDES * mx.random.normal((4, 24, 96), key=mx.random.key(1))


@pytest.fixture(scope="module")
def checkpoints(make_checkpoint, tmp_path_factory):
    return write_checkpoints(make_checkpoint, tmp_path_factory.mktemp("scaled"))


def parameters(folder):
    return dict(tree_flatten(mlx_lm.load(str(folder))[0].parameters()))


def test_rtn_is_that_of_mlx_lm(checkpoints, tmp_path):
    from test_ptq_methods import quantize

    base, _, codes = checkpoints
    plan, *_ = quantize("rtn", base, tmp_path / "q", **GRID)
    assert plan.specs[UP] == SPEC
    assert plan.specs["lm_head"] == PLAIN
    expected, actual = map(parameters, (codes, tmp_path / "q"))
    assert expected.keys() == actual.keys()
    assert all(mx.array_equal(v, actual[k]).item() for k, v in expected.items())
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config["quantization"][UP]["global_scale"] is True
    assert "global_scale" not in config["quantization"]


def test_gptq_has_less_error_with_the_global_scale(checkpoints, tmp_path):
    """Less than RTN, and less than without it; stock mlx-lm loads the tensors."""
    from test_ptq_methods import TOKENS, quantize

    base, *_ = checkpoints
    errors = {}
    for method, has_scale in (("rtn", True), ("gptq", True), ("gptq", False)):
        folder = tmp_path / f"{method} {has_scale}"
        grid = {"mode": "nvfp4", "global_scale": has_scale}
        overrides = {"*switch_mlp*": grid, "*": "skip"}
        plan, tensors, _ = quantize(method, base, folder, overrides=overrides)
        assert plan.specs[UP].global_scale == has_scale
        stored = parameters(folder)
        assert all(mx.array_equal(stored[k], v).item() for k, v in tensors.items())
        logits = [load(model).model(TOKENS) for model in (base, folder)]
        errors[method, has_scale] = mx.square(logits[1] - logits[0]).sum().item()
    assert errors["gptq", True] < 0.9 * errors["rtn", True]
    assert errors["gptq", True] < 0.95 * errors["gptq", False]


def test_qat_keeps_scales_and_trains_what_is_served():
    """Bit for bit, also of an expert of zeros and of weights that have grown."""
    quantizer = make_quantizer(QATConfig(**GRID), SPEC, mx.float16)
    assert quantizer.init(EXPERTS) == {}
    first = quantizer.pack(EXPERTS, {})
    for weight in (EXPERTS, 3 * EXPERTS[::-1]):
        packed = quantizer.pack(weight, {})
        for name in ("scales", "global_scale"):
            assert mx.array_equal(packed[name], first[name])
        forward = mx.compile(lambda w: quantizer.fake_quantize(w, {}))(weight)
        assert mx.array_equal(forward, dequantize(packed, SPEC, mx.float16))
    rtn = pack(EXPERTS, SPEC, mx.float32)
    errors = [
        mx.square(dequantize(tensors, SPEC, mx.float32) - EXPERTS).sum(axis=(1, 2))
        for tensors in (first, rtn)
    ]
    assert (errors[0] <= 0.955 * errors[1]).all()


def test_latent_weights_keep_codes_and_global_scale():
    packed = pack(EXPERTS, SPEC, mx.float16)
    quantizer = make_quantizer(QATConfig(**GRID), SPEC, mx.float16)
    latent = quantizer.latent_within_cell(packed, mx.random.key(2))
    again = quantizer.pack(latent, quantizer.init_from_codes(packed))
    levels, same = (dequantize(p, SPEC, mx.float32) for p in (packed, again))
    assert mx.array_equal(same, levels)
    assert mx.array_equal(again["global_scale"], packed["global_scale"])
    assert (latent != levels)[:3].mean().item() > 0.9


def test_minmax_quantizer_renews_the_global_scale():
    quantizer = make_quantizer(QATConfig(**GRID, quantizer="minmax"), SPEC, mx.float16)
    for weight in (EXPERTS, 2 * EXPERTS):
        expected = mx.abs(weight.astype(mx.float16)).max(axis=(1, 2))
        packed = quantizer.pack(weight, {})
        assert mx.array_equal(packed["global_scale"], expected.astype(mx.float32))
        served = dequantize(packed, SPEC, mx.float16)
        assert mx.array_equal(quantizer.fake_quantize(weight, {}), served)


def test_bytes_of_the_global_scale_are_counted():
    sizes = [
        sum(value.nbytes for value in pack(EXPERTS, spec, mx.float16).values())
        for spec in (SPEC, PLAIN)
    ]
    assert sizes[0] == sizes[1] + 4 * 4
    counted = [
        packed_bytes(EXPERTS.size, spec, mx.float16, num_experts=4)
        for spec in (SPEC, PLAIN)
    ]
    assert counted == sizes


def test_other_modes_and_models_without_experts_are_refused():
    with pytest.raises(ValidationError, match="global_scale needs mode: nvfp4; the"):
        QuantizationConfig(mode="mxfp4", global_scale=True)
    with pytest.raises(ValidationError, match="x: global_scale needs mode: nvfp4"):
        QuantizationConfig(overrides={"x": {"global_scale": True}})
    with pytest.raises(UserError, match="no layer that is quantized to nvfp4 has any"):
        select_layers(build_model(LLAMA), QuantizationConfig(**GRID))
    # Another mode of an override has no global scale.
    overrides = {"*down_proj": {"mode": "mxfp4"}, "*gate_proj": {"global_scale": False}}
    model = build_model(QWEN3_MOE | {"num_hidden_layers": 1})
    specs = select_layers(model, QuantizationConfig(**GRID, overrides=overrides)).specs
    has_scale = {path.rpartition(".")[2] for path in specs if specs[path].global_scale}
    assert has_scale == {"up_proj"}
