"""The forward weights of training are those of GGUF's blocks, bit for bit."""

import gguf
import mlx.core as mx
import numpy as np
import pytest
from lmx.config.quant_spec import GGUF_MODES, QuantSpec
from lmx.convert.gguf import blocks, k_blocks
from lmx.quantization.packing import dequantize
from lmx.quantization.target_layers import QuantizationPlan
from test_fake_quant import Run

PATHS = [f"self_attn.{x}_proj" for x in "qkvo"] + ["mlp.gate_proj", "mlp.up_proj"]
SMALL = "model.layers.0.mlp.down_proj"


def file_values(tensors, spec):
    if spec.stored is None:
        stored = {f"layer.{name}": value for name, value in tensors.items()}
        shape = tensors["weight"].shape
        factors = k_blocks.layer_factors(stored, "layer", shape)
        kind, raw = blocks.from_dense(tensors["weight"], factors)
    else:
        kind, raw = blocks.from_affine_groups(tensors, spec.bits, spec.group_size)
    assert kind == spec.mode.upper()
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_forward_weights_are_those_of_the_blocks(make_checkpoint, adapted):
    """Every layer has another type; 288 outputs are no multiple of 64."""
    sizes = {"hidden_size": 256, "intermediate_size": 288, "head_dim": 64}
    folder = make_checkpoint(dtype="float16", num_attention_heads=4, **sizes)
    k_modes = [mode for mode in GGUF_MODES if mode != "q4_0"]
    paths = [f"model.layers.0.{path}" for path in PATHS]
    modes = dict(zip(paths, k_modes, strict=True)) | {SMALL: "q4_0"}
    specs = {path: QuantSpec(mode=mode) for path, mode in modes.items()}
    run = Run(folder, QuantizationPlan(specs, {}), adapted=adapted)
    before = run.step.weight_transform.export_tensors(run.step.parameters)
    run.train(2)
    exported = run.step.weight_transform.export_tensors(run.step.parameters)
    *_, forward = run.train()
    forward = {k.replace(".linear.", "."): v for k, v in forward.items()}
    for path, spec in specs.items():
        tensors = {
            name.removeprefix(f"{path}."): value
            for name, value in exported.items()
            if name.startswith(f"{path}.")
        }
        served = dequantize(tensors, spec, mx.float16)
        assert mx.array_equal(forward[f"{path}.weight"], served), path
        assert np.array_equal(file_values(tensors, spec), np.array(served)), path
        name = f"{path}.weight"
        assert not mx.array_equal(before[name], exported[name]), path
