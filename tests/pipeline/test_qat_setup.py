"""QAT setup: initial latent weights, and settings that are refused."""

import mlx.core as mx
import pytest
from lmx.config.qat import QATConfig
from lmx.config.quant_spec import QuantSpec
from lmx.config.train import TrainConfig
from lmx.errors import UserError
from lmx.interfaces import Logger
from lmx.models.loader import load
from lmx.pipeline.context import write_model
from lmx.pipeline.train.qat import prepare, require_steps
from lmx.quantization.packing import dequantize, dequantized_model, pack
from lmx.quantization.qat.quantizers import LSQQuantizer
from lmx.quantization.target_layers import QuantizationPlan
from pydantic import ValidationError

UP, DOWN = (f"model.layers.0.mlp.{name}_proj" for name in ("up", "down"))
COMMON = {"steps": 10, "batch_size": 1}


def config(adapter=None, **qat) -> TrainConfig:
    return TrainConfig(**COMMON, adapter=adapter, qat=QATConfig(**qat))


@pytest.fixture
def mixed_model(make_checkpoint, tmp_path):
    """A checkpoint with one 3-bit and one 4-bit layer; the other layers are dense."""
    loaded = load(make_checkpoint(), compute="stored")
    weights = {k: v for k, v in mx.load(str(loaded.path / "model.safetensors")).items()}
    specs = {UP: QuantSpec(bits=3), DOWN: QuantSpec(bits=4)}
    packed = {
        f"{path}.{name}": value
        for path, spec in specs.items()
        for name, value in pack(weights[f"{path}.weight"], spec, loaded.dtype).items()
    }
    target = tmp_path / "mixed"
    write_model(target, loaded, weights, QuantizationPlan(specs, {}), packed)
    return load(target, compute="stored")


def test_prepare_keeps_specs_of_quantized_layers(mixed_model):
    prepared = prepare(config(bits=3, quantizer="lsq"), mixed_model, Logger())
    assert prepared.selection.specs == {UP: QuantSpec(bits=3), DOWN: QuantSpec(bits=4)}
    assert "model.embed_tokens" in prepared.selection.skipped
    assert not prepared.selection.specs.keys() & prepared.selection.skipped
    for path, spec in prepared.selection.specs.items():
        weight = dict(prepared.loaded.model.named_modules())[path].weight
        packed = prepared.packed[path]
        quantizer = LSQQuantizer(spec, mixed_model.dtype)
        stored = quantizer.pack(weight, quantizer.init_from_codes(packed))
        assert weight.dtype == mx.float32
        assert mx.array_equal(stored["weight"], packed["weight"])
        assert not mx.array_equal(weight, dequantize(packed, spec, mx.float32))


def weights_of(prepared):
    modules = dict(prepared.loaded.model.named_modules())
    return {path: modules[path].weight for path in (UP, DOWN)}


def initial_weights(mixed_model, seed=0):
    """The initial latent weights of QAT on a quantized model."""
    qat = config(bits=3, quantizer="lsq")
    return weights_of(prepare(qat, mixed_model, Logger(), seed=seed))


def test_latent_weights_are_random_by_seed(mixed_model):
    weights, again = initial_weights(mixed_model), initial_weights(mixed_model)
    other_seed = initial_weights(mixed_model, seed=1)
    dequantized, _ = dequantized_model(mixed_model, mx.float32)
    modules = dict(dequantized.model.named_modules())
    code_weights = {path: modules[path].weight for path in weights}
    for path, weight in weights.items():
        assert mx.array_equal(weight, again[path])
        assert not mx.array_equal(weight, other_seed[path])
        assert not mx.array_equal(weight, code_weights[path])
    # Layers do not share random numbers.
    size = min(weight.size for weight in weights.values())
    places = [
        (weight - code_weights[path]).reshape(-1)[:size]
        for path, weight in weights.items()
    ]
    products = [mx.abs((places[0] * other).mean()).item() for other in places]
    assert products[1] < 0.1 * products[0]


def test_fixed_codes_are_the_default_of_a_quantized_model(mixed_model):
    qat = prepare(config(bits=3), mixed_model, Logger()).qat
    assert qat.quantizer == "fixed_codes"
    adapted = prepare(config(bits=3, adapter={}), mixed_model, Logger()).qat
    assert adapted.quantizer == "fixed_scale"


def test_fixed_codes_need_codes(make_checkpoint):
    dense = load(make_checkpoint(), compute="stored")
    with pytest.raises(UserError, match="this model is not quantized"):
        prepare(config(bits=4, quantizer="fixed_codes"), dense, Logger())
    with pytest.raises(ValidationError, match="an adapter changes codes"):
        config(bits=4, quantizer="fixed_codes", adapter={})


@pytest.mark.parametrize(
    ("qat", "message"),
    [
        (
            {"bits": 8, "quantizer": "lsq"},
            "quantized to [34] bits .*; the recipe has 8 bits",
        ),
        (
            {"bits": 4, "group_size": 32, "quantizer": "fixed_scale"},
            "the recipe has 4 bits in groups of",
        ),
        ({"bits": 4, "quantizer": "minmax"}, "training would quantize it again"),
        (
            {"bits": 4, "quantizer": "lsq", "fake_quant_after_n_steps": 2},
            "would quantize it again",
        ),
    ],
)
def test_quantized_model_is_never_quantized_again(mixed_model, qat, message):
    with pytest.raises(UserError, match=message):
        prepare(config(**qat), mixed_model, Logger())


@pytest.mark.parametrize(
    ("qat", "quantized_here"), [({"bits": 8}, True), ({"quantizer": "lsq"}, False)]
)
def test_the_grids_of_a_mixed_model_stay(mixed_model, qat, quantized_here):
    """Even if no layer has the grid of the recipe, or the recipe names none."""
    prepared = prepare(
        config(**qat), mixed_model, Logger(), quantized_here=quantized_here
    )
    assert prepared.selection.specs == {UP: QuantSpec(bits=3), DOWN: QuantSpec(bits=4)}


def test_settings_of_another_model_are_refused(mixed_model):
    with pytest.raises(UserError, match="full fine-tuning needs its weights"):
        prepare(TrainConfig(**COMMON), mixed_model, Logger())


@pytest.mark.parametrize(
    ("qat", "message"),
    [
        ({"mode": "mxfp4", "quantizer": "minmax"}, "would quantize it again"),
        (
            {"mode": "mxfp4", "fake_quant_after_n_steps": 1},
            "would quantize it again",
        ),
        ({"mode": "nvfp4"}, "quantized to 4 bits in groups of 32 .mxfp4."),
        (
            {"mode": "nvfp4", "quantize_activations": True},
            "does not quantize its activations",
        ),
    ],
)
def test_floating_point_model_is_never_quantized_again(
    make_checkpoint, tmp_path, qat, message
):
    loaded = load(make_checkpoint(), compute="stored")
    weights = dict(mx.load(str(loaded.path / "model.safetensors")))
    spec = QuantSpec(mode="mxfp4")
    packed = pack(weights[f"{UP}.weight"], spec, loaded.dtype)
    packed = {f"{UP}.{name}": value for name, value in packed.items()}
    write_model(
        tmp_path / "mx", loaded, weights, QuantizationPlan({UP: spec}, {}), packed
    )
    quantized = load(tmp_path / "mx", compute="stored")
    prepared = prepare(config(mode="mxfp4"), quantized, Logger())
    assert prepared.qat.quantizer == "fixed_scale"
    # In self-distillation too, where affine grids begin at the codes.
    options = COMMON | {"qat": QATConfig(mode="mxfp4"), "teacher": {}}
    prepared = prepare(TrainConfig(**options), quantized, Logger())
    levels = dequantize(prepared.packed[UP], spec, mx.float32)
    latent = dict(prepared.loaded.model.named_modules())[UP].weight
    assert not mx.allclose(latent, levels)
    with pytest.raises(UserError, match=message):
        prepare(config(**qat), quantized, Logger())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"load_best_at_end": True},
            "fake_quant_after_n_steps does not work with load_best_at_end",
        ),
        (
            {"early_stopping_patience": 2},
            "fake_quant_after_n_steps does not work with load_best_at_end",
        ),
        ({"steps": 5}, "fake_quant_after_n_steps must be below steps"),
        (
            {"qat": None, "compare_full_precision": True},
            "compare_full_precision needs qat",
        ),
    ],
)
def test_conflicting_qat_settings_are_refused(settings, message):
    delayed = {"qat": QATConfig(fake_quant_after_n_steps=5)}
    with pytest.raises(ValidationError, match=message):
        TrainConfig(**COMMON | delayed | settings)


def test_require_steps_refuses_late_phases():
    require_steps(QATConfig(fake_quant_after_n_steps=5), 6)
    require_steps(None, 1)
    with pytest.raises(UserError, match="begins after 5 steps, and there are 5"):
        require_steps(QATConfig(fake_quant_after_n_steps=5), 5)
