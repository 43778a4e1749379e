"""TODO."""

import json
import math
import shutil
from pathlib import Path

import mlx.core as mx

from ..config.quant_spec import QuantSpec
from . import safetensors_io

SHARD_BYTES = 5 << 30

# What a config says of another checkpoint or machine.
FOREIGN = ("quantization", "quantization_config", "_name_or_path")

# Everything beside weights and config that makes a checkpoint speak as its base did.
COMPANIONS = (
    "tokenizer*.json",
    "*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template*",
    "*.tiktoken",
    "generation_config.json",
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
) -> None:
    """Write a checkpoint into an existing, empty folder.

    Args:
        weights: tensors by mlx-lm's module paths; quantized layers as they were
            produced: `path.weight` (codes), `path.scales` and, if affine,
            `path.biases`. Emptied on the way: what is unread is read, written and let
            go, one after the other.
        config: the model's config; its quantization block is replaced.
        companions: the folder whose tokenizer and template files go along.
        specs: grid of every quantized layer, by path.
        kept: quantizable layers left unquantized, named for readers that assume the
            default (mlx-swift does).
    """
    config = {k: v for k, v in config.items() if k not in FOREIGN}
    # Readers take a model with this key for one that sees; mlx-lm drops it too.
    if not any("vision_tower" in name for name in weights):
        config.pop("vision_config", None)
    if specs:
        config["quantization"] = quantization_block(specs, kept or [])
        config["quantization_config"] = config["quantization"]
    _write_json(folder / "config.json", _tagged(dict(sorted(config.items()))))
    _copy_companions(companions, folder, with_code="model_file" in config)
    _write_weights(folder, weights, specs or {})


def quantization_block(specs: dict[str, QuantSpec], kept: list[str]) -> dict:
    """The `quantization` entry of config.json.

    The most frequent grid is the default; every other layer is listed by path, in
    dictionaries of exactly the keys mlx-swift decodes, or `false` when not quantized.
    """
    grids = [tuple(spec_parameters(spec).items()) for spec in specs.values()]
    default = max(sorted(set(grids)), key=grids.count)
    block: dict = dict(default)
    for path, spec in sorted(specs.items()):
        if tuple(spec_parameters(spec).items()) != default:
            block[path] = spec_parameters(spec)
    return block | {path: False for path in sorted(kept)}


def spec_parameters(spec: QuantSpec) -> dict:
    """A grid as mlx-lm names it."""
    return {"group_size": spec.group_size, "bits": spec.bits, "mode": spec.mode}


def _tagged(value):
    """Non-finite numbers, which JSON lacks, as Hugging Face and mlx-lm write them."""
    if isinstance(value, float) and not math.isfinite(value):
        names = {math.inf: "Infinity", -math.inf: "-Infinity"}
        return {"__float__": names.get(value, "NaN")}
    if isinstance(value, dict):
        return {key: _tagged(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_tagged(entry) for entry in value]
    return value


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=4, allow_nan=False) + "\n")


def _copy_companions(source: Path, folder: Path, *, with_code: bool) -> None:
    settings = source / "tokenizer_config.json"
    with_code |= settings.is_file() and b'"auto_map"' in settings.read_bytes()
    for pattern in (*COMPANIONS, *(["*.py"] if with_code else [])):
        for file in filter(Path.is_file, source.glob(pattern)):
            shutil.copyfile(file, folder / file.name)


def _write_weights(
    folder: Path, weights: dict[str, mx.array], specs: dict[str, QuantSpec]
) -> None:
    total = sum(value.nbytes for value in weights.values())
    parameters = count_parameters(weights, specs)
    shards = _shards(weights)
    places = {}
    for number, names in enumerate(shards, 1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        safetensors_io.write_safetensors(
            folder / file, {name: weights.pop(name) for name in names}
        )
        places |= dict.fromkeys(names, file)
    index = {
        "metadata": {"total_size": total, "total_parameters": parameters},
        "weight_map": dict(sorted(places.items())),
    }
    _write_json(folder / "model.safetensors.index.json", index)


def _shards(weights: dict[str, mx.array]) -> list[list[str]]:
    """Names by file, in their order."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, value in weights.items():
        if shards[-1] and size + value.nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += value.nbytes
    return shards


def count_parameters(weights: dict[str, mx.array], specs: dict[str, QuantSpec]) -> int:
    """Numbers the model has, a code counting as one and its grid as none."""
    total = 0
    for name, value in weights.items():
        path, _, leaf = name.rpartition(".")
        if path in specs and leaf in ("scales", "biases"):
            continue
        codes = path in specs and leaf == "weight"
        total += value.size * 32 // specs[path].bits if codes else value.size
    return total
