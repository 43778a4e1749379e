"""Write checkpoints as mlx-lm, LM Studio and mlx-swift load them."""

import json
import math
from pathlib import Path

import mlx.core as mx

from ..config.quant_spec import QuantSpec
from ..files.atomic import copy_file
from .checkpoint import GRID_TENSORS, INDEX_FILE
from .safetensors_io import write_safetensors

SHARD_BYTES = 5 << 30

# mlx-lm's config key of models whose layers quantize their inputs.
QUANTIZE_ACTIVATIONS = "quantize_activations"
# Keys of a grid in its block `quantization`.
GRID_KEYS = ("group_size", "bits", "mode")
# Config keys that describe another checkpoint or machine.
FOREIGN_KEYS = (
    *("quantization", "quantization_config", QUANTIZE_ACTIVATIONS, "_name_or_path"),
)

# Tokenizer, template and generation files of a checkpoint.
COMPANIONS = (
    *("tokenizer*.json", "*.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template*", "*.tiktoken"),
    *("additional_chat_templates/*.jinja", "generation_config.json"),
    "preprocessor_config.json",
)


def write_checkpoint(
    folder: Path,
    weights: dict[str, mx.array],
    config: dict,
    *,
    companions: Path,
    specs: dict[str, QuantSpec] | None = None,
    kept: list[str] | None = None,
    quantize_activations: bool = False,
) -> None:
    """Write a checkpoint into an existing, empty folder.

    Args:
        weights: tensors by mlx-lm's module paths; quantized layers as they were
            produced: `path.weight` (codes), `path.scales`, `path.biases` if affine and
            `path.global_scale` if the grid has it. The dictionary is emptied: unread
            tensors are read, written and freed one by one.
        config: the model's config; its quantization block is replaced.
        companions: the folder whose tokenizer and template files are copied.
        specs: grid of every quantized layer, by path.
        kept: quantizable layers left unquantized. They are listed for readers that
            assume the default grid, as mlx-swift does.
        quantize_activations: whether readers quantize the inputs of linear layers too.
    """
    config = {k: v for k, v in config.items() if k not in FOREIGN_KEYS}
    # Readers take a model with this key for a vision model; mlx-lm drops it too.
    if not any("vision_tower" in name for name in weights):
        config.pop("vision_config", None)
    if specs:
        config["quantization"] = quantization_block(specs, kept or [])
        config["quantization_config"] = config["quantization"]
        if quantize_activations:
            config[QUANTIZE_ACTIVATIONS] = True
    write_config(folder, config)
    tokenizer, patterns = companions / "tokenizer_config.json", list(COMPANIONS)
    has_own_class = tokenizer.is_file() and b'"auto_map"' in tokenizer.read_bytes()
    if "model_file" in config or has_own_class:
        patterns.append("*.py")
    for pattern in patterns:
        for file in filter(Path.is_file, companions.glob(pattern)):
            target = folder / file.relative_to(companions)
            target.parent.mkdir(exist_ok=True)
            copy_file(file, target)
    specs = specs or {}
    total = parameters = size = 0
    shards: list[list[str]] = [[]]
    for name, value in weights.items():
        if shards[-1] and size + value.nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size, total = size + value.nbytes, total + value.nbytes
        # A code counts as one parameter, its grid as none.
        path, _, leaf = name.rpartition(".")
        if path in specs and leaf == "weight":
            parameters += value.size * 32 // specs[path].bits
        elif path not in specs or leaf not in GRID_TENSORS:
            parameters += value.size
    weight_map = {}
    for number, names in enumerate(shards, 1):
        shard = "model.safetensors"
        if len(shards) > 1:
            shard = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / shard, {name: weights.pop(name) for name in names})
        weight_map |= dict.fromkeys(names, shard)
    index = {
        "metadata": {"total_size": total, "total_parameters": parameters},
        "weight_map": dict(sorted(weight_map.items())),
    }
    _write_json(folder / INDEX_FILE, index)


def write_config(folder: Path, config: dict) -> None:
    """Write config.json, with its keys sorted as mlx-lm sorts them."""
    _write_json(folder / "config.json", _encode_nonfinite(dict(sorted(config.items()))))


def quantization_block(specs: dict[str, QuantSpec], kept: list[str]) -> dict:
    """The `quantization` entry of config.json.

    The most frequent grid is the default. Every other layer is listed by path, with
    exactly the keys that mlx-swift decodes, or with `false` if it is not quantized.
    """
    grids = [tuple(spec_parameters(spec).items()) for spec in specs.values()]
    # A global scale is part of a layer: mlx-lm reads it from the entry of the layer.
    common = [grid for grid in grids if len(grid) == len(GRID_KEYS)] or [
        grid[: len(GRID_KEYS)] for grid in grids
    ]
    default = max(sorted(set(common)), key=common.count)
    block: dict = dict(default)
    for path, spec in sorted(specs.items()):
        if tuple(spec_parameters(spec).items()) != default:
            block[path] = spec_parameters(spec)
    return block | {path: False for path in sorted(kept)}


def spec_parameters(spec: QuantSpec) -> dict:
    """A grid in mlx-lm's names."""
    grid = {key: getattr(spec, key) for key in GRID_KEYS}
    return grid | {"global_scale": True} if spec.global_scale else grid


def _encode_nonfinite(value):
    """Encode non-finite numbers as Hugging Face and mlx-lm do; JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        names = {math.inf: "Infinity", -math.inf: "-Infinity"}
        return {"__float__": names.get(value, "NaN")}
    if isinstance(value, dict):
        return {key: _encode_nonfinite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_encode_nonfinite(entry) for entry in value]
    return value


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=4, allow_nan=False) + "\n")
