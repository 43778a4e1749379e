"""Checkpoint sizes from headers; test_mlx_export compares them with mlx-lm's count."""

import json

import mlx.core as mx
from lmx.models.checkpoint import checkpoint_size


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
