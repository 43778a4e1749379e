"""Adapters of Hugging Face's peft (LoRA, rsLoRA, DoRA) in mlx-lm's format.

peft stores A [rank, in] and B [out, rank]; mlx-lm stores their transposes. peft's scale
is alpha / rank, or alpha / sqrt(rank) with `use_rslora`.
"""

import json
import math
import os
import re
import warnings
from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx

from ...data import cache
from ...errors import UserError, library_errors
from ...models.safetensors_io import read_tensors
from ...run.fs import read_json

# Part of the cache key; changes when an import writes other values.
VERSION = 1
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# mlx-lm's name of a tensor and whether it is transposed, by peft's name.
LEAVES = {
    "lora_A.weight": ("lora_a", True),
    "lora_B.weight": ("lora_b", True),
    "lora_magnitude_vector": ("m", False),
}
# Settings that are read, or that do not change what a trained adapter computes.
SUPPORTED_KEYS = """
    task_type peft_type auto_mapping peft_version base_model_name_or_path revision
    inference_mode r target_modules exclude_modules lora_alpha lora_dropout bias
    use_rslora init_lora_weights layers_to_transform layers_pattern rank_pattern
    alpha_pattern megatron_core use_dora qalora_group_size eva_config
    ensure_weight_tying runtime_config
"""
# Initializations that do not change the base weights.
SUPPORTED_INITS = (True, False, "gaussian", "orthogonal", "eva")


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter in peft's format."""
    file = folder / CONFIG
    return file.is_file() and "peft_type" in read_json(file)


def read(folder: Path) -> tuple[dict[str, mx.array], dict]:
    """Tensors by mlx-lm's names, and mlx-lm's adapter config, of a peft folder.

    Layers of a smaller rank are padded with zeros to the largest rank. If scales
    differ, the scale in the config is 1 and every B is multiplied by its scale.

    Raises:
        UserError: mlx-lm has no such adapter, or the folder is damaged.
    """
    place = str(folder)
    config = read_json(folder / CONFIG)
    _check_supported(config, place)
    file = folder / WEIGHTS
    if not file.is_file():
        raise UserError(f"this adapter has no {WEIGHTS}", place=place)
    layers: dict[str, dict[str, mx.array]] = {}
    for name, value in read_tensors(file).items():
        path, leaf = _path(name, place)
        name, transposed = LEAVES[leaf]
        layers.setdefault(path, {})[name] = value.T if transposed else value
    leaves = {"lora_a", "lora_b", *(["m"] if config.get("use_dora") else [])}
    for path, layer in layers.items():
        complete = layer.keys() == leaves
        if not complete or layer["lora_a"].shape[1] != len(layer["lora_b"]):
            raise UserError(f"the adapter of {path} is incomplete", place=place)
    if not layers:
        raise UserError("this adapter has no matrices", place=place)
    with library_errors(f"{CONFIG} is damaged", place=place):
        return _to_mlx_lm(layers, config)


def _to_mlx_lm(layers: dict[str, dict[str, mx.array]], config: dict):
    scales = {path: _scale(path, layer, config) for path, layer in layers.items()}
    rank = max(len(layer["lora_b"]) for layer in layers.values())
    scale = next(iter(scales.values())) if len(set(scales.values())) == 1 else 1.0
    tensors = {}
    for path, layer in layers.items():
        missing = rank - len(layer["lora_b"])
        tensors[f"{path}.lora_a"] = mx.pad(layer["lora_a"], [(0, 0), (0, missing)])
        b = layer["lora_b"]
        if scales[path] != scale:
            b = (scales[path] / scale) * b.astype(mx.float32)
        tensors[f"{path}.lora_b"] = mx.pad(b, [(0, missing), (0, 0)])
        if "m" in layer:
            tensors[f"{path}.m"] = layer["m"]
    return tensors, {
        "fine_tune_type": "dora" if config.get("use_dora") else "lora",
        "num_layers": _block_count(layers),
        "lora_parameters": {
            "rank": rank,
            "scale": scale,
            "dropout": config.get("lora_dropout") or 0.0,
            # Full paths, so that no other block gets an adapter.
            "keys": sorted(layers),
        },
    }


def resolve_adapter(source: str | Path) -> Path:
    """The folder of an adapter in mlx-lm's format; peft's is converted in the cache.

    Raises:
        UserError: there is no adapter, or mlx-lm has no such adapter.
    """
    folder = Path(os.path.expanduser(source))
    if not (folder / CONFIG).is_file():
        raise UserError(f"the adapter does not load: no {CONFIG}", place=str(source))
    if not is_adapter(folder):
        return folder
    files = [folder / name for name in (CONFIG, WEIGHTS) if (folder / name).is_file()]
    facts = {file.name: cache.file_hash(file) for file in files}

    def fill(target: Path) -> dict:
        convert_adapter(folder, target)
        return {"source": folder.name}

    key = cache.key_of(["peft", VERSION, facts])
    size = sum(file.stat().st_size for file in files)
    return cache.get_or_create(
        "imports", key, fill, warning=warnings.warn, space=2 * size
    ).folder


def convert_adapter(source: Path, target: Path) -> None:
    """Write the adapter of a peft folder into an empty folder in mlx-lm's format.

    Raises:
        UserError: see `read`.
    """
    tensors, config = read(source)
    tensors = {name: mx.contiguous(value) for name, value in tensors.items()}
    mx.save_safetensors(str(target / "adapters.safetensors"), tensors)
    (target / CONFIG).write_text(json.dumps(config, indent=4) + "\n")


def _check_supported(config: dict, place: str) -> None:
    kind, supported = config.get("peft_type"), SUPPORTED_KEYS.split()
    unsupported = [
        key for key, value in config.items() if value and key not in supported
    ]
    if config.get("bias", "none") != "none":
        unsupported.append("bias")
    if config.get("init_lora_weights", True) not in SUPPORTED_INITS:
        unsupported.append("init_lora_weights")
    if kind != "LORA" or unsupported:
        what = f"type {kind}"
        if unsupported:
            what = f"{unsupported[0]}: {config[unsupported[0]]}"
        raise UserError(f"peft adapters with {what} are not supported", place=place)


def _path(name: str, place: str) -> tuple[str, str]:
    for leaf in LEAVES:
        if name.startswith(PREFIX) and name.endswith(f".{leaf}"):
            return name[len(PREFIX) : -len(leaf) - 1], leaf
    raise UserError(
        f"the tensor {name} does not belong to the adapter of a linear layer",
        place=place,
        hint="adapters of embeddings, experts and fully trained layers are not "
        "supported",
    )


def _scale(path: str, layer: dict[str, mx.array], config: dict) -> float:
    rank = len(layer["lora_b"])
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            alpha = value
            break
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _block_count(paths: Iterable[str]) -> int:
    matches = (re.search(r"\.layers\.(\d+)\.", path) for path in paths)
    return 1 + max((int(match[1]) for match in matches if match), default=0)
