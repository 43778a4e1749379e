"""The bundled base model, reduced: training and quantization take seconds."""

import json
import shutil
from pathlib import Path

import mlx.core as mx

BASE = Path(__file__).parents[1] / "data/tiny-base"
LAYERS, VOCABULARY = "num_hidden_layers", 2048
HALVED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
)


def write_small_base(folder: Path, blocks: int = 2, half_width: bool = True) -> Path:
    """Write its first blocks, with the same tokenizer."""
    shutil.copytree(BASE, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((folder / "config.json").read_text())
    deeper = tuple(f"model.layers.{n}." for n in range(blocks, config.pop(LAYERS)))
    config[LAYERS] = blocks
    if half_width:
        config |= {key: config[key] // 2 for key in HALVED}
    (folder / "config.json").write_text(json.dumps(config))
    weights = mx.load(str(BASE / "model.safetensors"))
    weights = {k: v for k, v in weights.items() if not k.startswith(deeper)}
    if half_width:
        weights = {k: halved(v) for k, v in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def halved(weight: mx.array) -> mx.array:
    sizes = (n if n == VOCABULARY else n // 2 for n in weight.shape)
    return weight[tuple(map(slice, sizes))]
