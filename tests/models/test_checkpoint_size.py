"""Checkpoint sizes from headers; test_mlx_export compares them with mlx-lm's count."""

import json

import mlx.core as mx
from lmx.models.checkpoint import checkpoint_size
from lmx.pipeline.estimate import ModelShape


def test_checkpoint_size_counts_each_code_as_one_parameter(tmp_path):
    config = {"quantization": {"bits": 3, "group_size": 32, "b": {"bits": 8}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for number, (name, bits) in enumerate({"a": 3, "b": 8, "c": None}.items()):
        weight = mx.random.normal((4, 64)).astype(mx.float16)
        tensors = {"weight": weight}
        if bits:
            packed = mx.quantize(weight, group_size=32, bits=bits)
            tensors = dict(zip(("weight", "scales", "biases"), packed, strict=True))
        file = tmp_path / f"model-{number}.safetensors"
        mx.save_safetensors(str(file), {f"{name}.{k}": v for k, v in tensors.items()})
    sizes = checkpoint_size(tmp_path)
    assert sizes.parameters == 3 * 4 * 64
    # Codes, and a 16-bit scale and bias per group.
    assert sizes.bytes == 256 * 3 // 8 + 32 + 256 + 32 + 512
    assert sizes.float_values == 16 + 16 + 256
    assert {path: grid["bits"] for path, grid in sizes.grids.items()} == {
        "a": 3,
        "b": 8,
    }


def test_shape_has_grids_that_lmx_does_not_train(tmp_path):
    """Such as 1 bit, which MLX loads: other stages than QAT can read the model."""
    config = {"quantization": {"bits": 1, "group_size": 32}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {"a.weight": mx.zeros((4, 2), mx.uint32), "a.scales": mx.ones((4, 2))}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    (spec,) = ModelShape.of_folder(tmp_path, config).specs.values()
    assert (spec.bits, spec.group_size, spec.mode) == (1, 32, "affine")
