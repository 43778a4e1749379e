"""A mixture whose experts mlx-lm quantized with a `global_scale`."""

import json
import shutil

import mlx.core as mx
import mlx_lm.utils
from mlx.utils import tree_flatten
from tiny_checkpoints import QWEN3_MOE

GRID = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
UP = "model.layers.0.mlp.switch_mlp.up_proj"


def write_checkpoints(make_checkpoint, folder):
    """The folders of a mixture, of one with the float32 weights of its codes, and of
    the codes as mlx-lm stores them."""
    source = make_checkpoint(QWEN3_MOE, dtype="float32", num_hidden_layers=1)
    model, config = mlx_lm.utils.load_model(source)
    for name in ("gate_proj", "up_proj", "down_proj"):
        layer = model.layers[0].mlp.switch_mlp[name]
        # Of the size of trained weights; those of the experts differ.
        layer.weight *= mx.array([0.3, 0.2, 0.1, 0.05])[:, None, None]
    folders = tuple(folder / name for name in ("base", "dense", "codes"))
    for copy in folders:
        shutil.copytree(source, copy)
    base, dense, codes = folders
    write(base, model)
    model, config = mlx_lm.utils.quantize_model(
        model, config, None, None, mode="nvfp4", global_scale=True
    )
    write(codes, model)
    (codes / "config.json").write_text(json.dumps(config))
    tensors = dict(tree_flatten(model.parameters()))
    for path in [n.removesuffix(".scales") for n in tensors if n.endswith(".scales")]:
        tensors[f"{path}.weight"] = dequantized(tensors, path)
        for name in ("scales", "biases", "global_scale"):
            tensors.pop(f"{path}.{name}", None)
    save(dense, tensors)
    return folders


def write(folder, model):
    save(folder, dict(tree_flatten(model.parameters())))


def save(folder, tensors):
    file = str(folder / "model.safetensors")
    mx.save_safetensors(file, tensors, {"format": "mlx"})


def dequantized(tensors, path):
    """The weight of a layer, expert by expert with `mx.dequantize`."""
    names = ("weight", "scales", "biases", "global_scale")
    codes, scales, biases, scale = (tensors.get(f"{path}.{name}") for name in names)
    if biases is not None:
        # The router.
        return mx.dequantize(codes, scales, biases, group_size=64, bits=8)
    if scale is None:
        return mx.dequantize(codes, scales, dtype=mx.float32, **GRID)
    experts = zip(codes, scales, scale, strict=True)
    return mx.stack(
        [
            mx.dequantize(*parts, global_scale=number, dtype=mx.float32, **GRID)
            for *parts, number in experts
        ]
    )
