"""Recipes that quantize to block types of GGUF: what is trained is what is served."""

import gguf
import mlx.core as mx
import numpy as np
import pytest
from lmx.convert.exporters.hf import dequantized_weights
from lmx.models.loader import load
from tiny_runs import TRAIN, Run

# A K block fits the width, but not the 288 inputs of down_proj. 288 is no multiple of
# 64 either.
SCRATCH = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 288,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
NARROW = {"q4_0": "Q4_0", "q4_k": "Q5_0", "q3_k": "Q4_0", "q6_k": "Q8_0"}
NAMES = {"q_proj": "attn_q", "o_proj": "attn_output", "gate_proj": "ffn_gate"}
NAMES |= {"up_proj": "ffn_up", "down_proj": "ffn_down", "v_proj": "attn_v"}


def slow(mode):
    return pytest.param(mode, marks=pytest.mark.slow)


def file_weights(run):
    """Type and values of the layers of the file that have the order of the model."""
    [file] = (run.output / "gguf").glob("*.gguf")
    tensors = {t.name: t for t in gguf.GGUFReader(file).tensors}
    names = {f"blk.0.{n}.weight": k for k, n in NAMES.items() if n != "attn_q"}
    names |= {"token_embd.weight": "embed_tokens"}
    return {
        layer: (
            tensors[name].tensor_type.name,
            gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type),
        )
        for name, layer in names.items()
    }


def assert_served_as_trained(run, mode):
    model = load(run.output / "model", compute="stored").model
    served = dequantized_weights(model, mx.float32)
    for layer, (kind, values) in file_weights(run).items():
        [name] = [k for k in served if k.endswith(f"{layer}.weight")]
        narrow = layer == "down_proj"
        assert kind == (NARROW[mode] if narrow else mode.upper())
        assert np.array_equal(np.array(served[name]), values), layer


def run_stages(folder, *stages):
    export = {"export": {"formats": ["mlx", "gguf"]}}
    run = Run(folder, *stages, export)
    run.model = {"from_scratch": SCRATCH}
    run.write()
    assert run() == 0
    return run


@pytest.mark.parametrize("mode", ["q4_k", slow("q4_0")])
def test_trained_weights_are_those_of_the_file(tmp_path, mode):
    train = TRAIN | {"qat": {"mode": mode}, "steps": 2, "save_steps": 10}
    assert_served_as_trained(run_stages(tmp_path, {"train": train}), mode)


@pytest.mark.parametrize("mode", ["q4_k", slow("q3_k"), slow("q6_k")])
def test_gptq_weights_are_those_of_the_file(tmp_path, mode):
    calibration = {"num_tokens": 512, "max_seq_length": 64, "num_eval_tokens": 128}
    quantize = {"method": "gptq", "mode": mode, "calibration": calibration}
    quantize |= {"effort": "fast", "rollback_if_worse": True}
    train = TRAIN | {"steps": 2, "save_steps": 10}
    run = run_stages(tmp_path, {"train": train}, {"quantize": quantize})
    assert_served_as_trained(run, mode)
    assert "gptq: held-out KL" in run.log
    config = run.json("model/config.json")
    layers = config["quantization"]
    grid = {"group_size": 32, "bits": 4, "mode": "affine"}
    if mode == "q4_k":
        assert {key: layers[key] for key in grid} == grid
    else:
        # Groups of 16 are dense; the narrow layer has groups of 32.
        assert layers["model.layers.0.mlp.up_proj"] is False
        assert layers["bits"] == {"q3_k": 4, "q6_k": 8}[mode]


@pytest.mark.slow
def test_training_from_the_codes_stays_on_the_blocks(tmp_path):
    """An adapter moves weights between the levels of the blocks."""
    calibration = {"num_tokens": 512, "max_seq_length": 64}
    quantize = {"mode": "q4_k", "calibration": calibration}
    qat = {"bits": 4, "group_size": 32, "quantizer": "fixed_scale"}
    train = TRAIN | {"steps": 2, "save_steps": 10}
    adapt = train | {"adapter": {"rank": 4}, "qat": qat, "learning_rate": 0.03}
    run = run_stages(
        tmp_path, {"train": train}, {"quantize": quantize}, {"train": adapt}
    )
    assert_served_as_trained(run, "q4_k")
    folders = [run.output / f"stages/{n}/model" for n in ("2-quantize", "3-train")]
    before, after = (mx.load(str(f / "model.safetensors")) for f in folders)
    name = "model.layers.0.mlp.up_proj"
    assert not mx.array_equal(before[f"{name}.weight"], after[f"{name}.weight"])
    assert mx.array_equal(before[f"{name}.scales"], after[f"{name}.scales"])
