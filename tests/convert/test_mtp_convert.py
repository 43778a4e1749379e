"""Multi-token-prediction heads in checkpoints that lmx imports or dequantizes."""

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
from lmx.cli import main
from lmx.models.drafters.mtp import MTP_FILE, MTPHead, read_mtp
from lmx.models.loader import load
from mlx.utils import tree_flatten
from packers import compressed, gptq, random_codes
from safetensors.numpy import save_file
from tiny_mtp import published_weights, tiny_mtp, write_published

LAYERS = ("model.language_model.layers.1.mlp.down_proj", "mtp.layers.0.mlp.up_proj")
SCHEME = {"num_bits": 4, "group_size": 32, "symmetric": True}
FORMATS = {
    "gptq": (
        lambda codes: gptq(codes, 4),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False},
    ),
    "compressed-tensors": (
        lambda codes: compressed(codes, 4, symmetric=True),
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": SCHEME}},
        },
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_imported_head_is_dequantized(tmp_path, tokenizer_folder, name):
    packed, settings = FORMATS[name]
    model, head, config = tiny_mtp()
    tensors = {k: np.array(v) for k, v in published_weights(model, head).items()}
    expected = dict(tree_flatten(head.parameters()))
    rng = np.random.default_rng(0)
    for path in LAYERS:
        shape = tensors.pop(f"{path}.weight").shape
        codes = random_codes(rng, *shape, bits=4, size=32, symmetric=True)
        for leaf, value in packed(codes).items():
            tensors[f"{path}.{leaf}"] = np.ascontiguousarray(value)
        weight = mx.array(codes.weight.astype(np.float32))
        if path.startswith("mtp."):
            expected[f"{path.removeprefix('mtp.')}.weight"] = weight
    source, target = tmp_path / "foreign", tmp_path / "mlx"
    shutil.copytree(tokenizer_folder, source)
    save_file(tensors, source / "model.safetensors")
    config |= {"quantization_config": settings}
    (source / "config.json").write_text(json.dumps(config))
    assert main.main(["convert", str(source), str(target)]) == 0
    imported = read_mtp(target, config)
    assert imported.keys() == expected.keys()
    for path, value in expected.items():
        # The scales, and so what is dequantized, are float16.
        assert mx.allclose(imported[path], value, rtol=2**-10, atol=1e-6), path
    assert MTPHead.load(target, load(target))


def test_dequantized_model_keeps_its_head(tmp_path, tokenizer_folder):
    write_published(tmp_path / "base", tokenizer_folder)
    arguments = ["--model", str(tmp_path / "base"), "--method", "rtn", "--bits", "4"]
    output = ["--output", str(tmp_path / "run"), "--quiet"]
    assert main.main(["quantize", *arguments, *output]) == 0
    model, dense = tmp_path / "run/model", tmp_path / "dense"
    assert main.main(["convert", str(model), str(dense), "--dequantize"]) == 0
    assert (dense / MTP_FILE).read_bytes() == (model / MTP_FILE).read_bytes()
