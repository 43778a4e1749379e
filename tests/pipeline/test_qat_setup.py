"""What a train stage refuses of a rounding, before and after it has seen the model."""

import mlx.core as mx
import pytest
from lmx.config.lora import LoRAConfig
from lmx.config.qat import QATConfig
from lmx.config.quant_spec import QuantSpec
from lmx.config.train import TrainConfig
from lmx.errors import UserError
from lmx.models.loader import load
from lmx.pipeline.context import write_model
from lmx.pipeline.qat_setup import prepare, require_steps
from lmx.quantization.packing import dequantize, pack
from lmx.quantization.target_layers import QuantizationPlan
from lmx.run.logger import NullLogger
from pydantic import ValidationError

UP, DOWN = (f"model.layers.0.mlp.{name}_proj" for name in ("up", "down"))
COMMON = {"steps": 10, "batch_size": 1}
PHASES = {"bit_schedule": [{"bits": 8, "steps": 5}]}
COMING_DOWN = {"qat": QATConfig(bits=2, **PHASES)}


def config(adapter=None, **rounding) -> TrainConfig:
    return TrainConfig(**COMMON, adapter=adapter, qat=QATConfig(**rounding))


@pytest.fixture
def mixed(make_checkpoint, tmp_path):
    """A checkpoint with layers of 3 and 4 bits, most of them dense."""
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


def test_prepare_keeps_specs_of_quantized_layers(mixed):
    found = prepare(config(bits=3, quantizer="lsq"), mixed, NullLogger())
    assert found.selection.specs == {UP: QuantSpec(bits=3), DOWN: QuantSpec(bits=4)}
    assert "model.embed_tokens" in found.selection.skipped
    assert not found.selection.specs.keys() & found.selection.skipped
    for path, spec in found.selection.specs.items():
        weight = dict(found.loaded.model.named_modules())[path].weight
        served = dequantize(found.packed[path], spec, mixed.dtype)
        step = mx.repeat(mx.abs(found.packed[path]["scales"]), 64, axis=-1)
        assert weight.dtype == mx.float32
        assert (mx.abs(weight - served) / step).max().item() < 0.5


def weights_of(found):
    modules = dict(found.loaded.model.named_modules())
    return {path: modules[path].weight for path in (UP, DOWN)}


def begun(mixed, origin=dict, seed=0, teacher=None, **rounding):
    """The weights a training from codes begins with."""
    settings = COMMON | {"qat": QATConfig(bits=3, quantizer="lsq", **rounding)}
    own = TrainConfig(**settings, teacher=teacher)
    return weights_of(
        prepare(own, mixed, NullLogger(), unquantized_weights=origin, seed=seed)
    )


@pytest.fixture
def dense(make_checkpoint):
    """What the layers of `mixed` were quantized from, by name."""
    weights = mx.load(str(load(make_checkpoint()).path / "model.safetensors"))
    return {f"{path}.weight": weights[f"{path}.weight"] for path in (UP, DOWN)}


def test_latent_weights_begin_near_unquantized_weights(mixed, dense):
    found = begun(mixed, dense.copy)
    points = begun(mixed, latent_init="codes")
    for path, weight in found.items():
        wished = dense[f"{path}.weight"].astype(mx.float32)
        left = mx.abs(weight - wished).mean() / mx.abs(points[path] - wished).mean()
        assert left.item() < 0.1


def test_latent_weights_of_unknown_origin_are_random_by_seed(mixed, dense):
    """As are those of layers whose scales a method has folded."""
    folded = {name: 3 * value for name, value in dense.items()}
    found, same = begun(mixed), begun(mixed, folded.copy)
    other, points = begun(mixed, seed=1), begun(mixed, latent_init="codes")
    for path, weight in found.items():
        assert mx.array_equal(weight, same[path])
        assert not mx.array_equal(weight, other[path])
        assert not mx.array_equal(weight, points[path])


def test_self_distillation_begins_at_the_codes(mixed, dense):
    points = begun(mixed, latent_init="codes")
    found = begun(mixed, dense.copy, teacher={})
    asked = begun(mixed, dense.copy, teacher={}, latent_init="nearest")
    for path, weight in points.items():
        assert mx.array_equal(found[path], weight)
        assert not mx.array_equal(asked[path], weight)


def test_latent_init_of_unquantized_model_is_refused(make_checkpoint):
    loaded = load(make_checkpoint(), compute="stored")
    with pytest.raises(UserError, match="latent_init is for a quantized model"):
        prepare(config(quantizer="lsq", latent_init="codes"), loaded, NullLogger())


@pytest.mark.parametrize(
    ("rounding", "said"),
    [
        (
            {"bits": 8, "quantizer": "lsq"},
            "quantized to [34] bits .*; the recipe has 8 bits",
        ),
        (
            {"bits": 4, "group_size": 32, "quantizer": "scales_only"},
            "the recipe has 4 bits in groups of",
        ),
        ({"bits": 4}, "training would quantize it again"),
        (
            {"bits": 4, "quantizer": "lsq", "fake_quant_after_n_steps": 2},
            "would quantize it again",
        ),
        ({"bits": 4, "quantizer": "lsq"} | PHASES, "would quantize it again"),
    ],
)
def test_quantized_model_is_never_quantized_again(mixed, rounding, said):
    with pytest.raises(UserError, match=said):
        prepare(config(**rounding), mixed, NullLogger())


def test_full_training_of_quantized_model_is_refused(mixed):
    with pytest.raises(UserError, match="full fine-tuning needs its weights"):
        prepare(TrainConfig(**COMMON), mixed, NullLogger())


def test_floating_point_codes_cannot_be_trained(make_checkpoint, tmp_path):
    loaded = load(make_checkpoint(), compute="stored")
    weights = dict(mx.load(str(loaded.path / "model.safetensors")))
    spec = QuantSpec(mode="mxfp4")
    packed = pack(weights[f"{UP}.weight"], spec, loaded.dtype)
    packed = {f"{UP}.{name}": value for name, value in packed.items()}
    write_model(
        tmp_path / "mx", loaded, weights, QuantizationPlan({UP: spec}, {}), packed
    )
    with pytest.raises(UserError, match="only affine quantization can be trained"):
        prepare(
            config(quantizer="lsq"),
            load(tmp_path / "mx", compute="stored"),
            NullLogger(),
        )


@pytest.mark.parametrize(
    ("change", "said"),
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
            COMING_DOWN | {"load_best_at_end": True},
            "bit_schedule does not work with load_best_at_end",
        ),
        (COMING_DOWN | {"steps": 5}, "bit_schedule must be below steps"),
        (
            {"qat": QATConfig(quantizer="scales_only"), "adapter": LoRAConfig()},
            "scales_only trains no weights",
        ),
    ],
)
def test_conflicting_qat_settings_are_refused(change, said):
    late = {"qat": QATConfig(fake_quant_after_n_steps=5)}
    with pytest.raises(ValidationError, match=said):
        TrainConfig(**COMMON | late | change)


def test_require_steps_refuses_late_phases():
    require_steps(QATConfig(fake_quant_after_n_steps=5), 6)
    require_steps(None, 1)
    with pytest.raises(UserError, match="begins after 5 steps, and there are 5"):
        require_steps(QATConfig(fake_quant_after_n_steps=5), 5)
    with pytest.raises(UserError, match="2 bits begins after 5 steps, and there are 4"):
        require_steps(COMING_DOWN["qat"], 4)
