"""Adapters of Hugging Face's peft (LoRA, rsLoRA, DoRA) as mlx-lm's, and back.

peft has A [rank, in] and B [out, rank], mlx-lm has both turned; peft's scale is alpha /
rank, or alpha / sqrt(rank) where `use_rslora` says so.
"""

import json
import math
import re
import warnings
from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx

from ...data import cache
from ...errors import UserError
from ...models.safetensors_io import read_header
from ...run.fs import read_json

# Other numbers from the same adapter: another version.
VERSION = 1
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# mlx-lm's name of a tensor and whether it is turned, by peft's name.
LEAVES = {
    "lora_A.weight": ("lora_a", True),
    "lora_B.weight": ("lora_b", True),
    "lora_magnitude_vector": ("m", False),
}
# Settings that change nothing of what a trained adapter computes, or that are read.
KNOWN = """
    task_type peft_type auto_mapping peft_version base_model_name_or_path revision
    inference_mode r target_modules exclude_modules lora_alpha lora_dropout bias
    use_rslora init_lora_weights layers_to_transform layers_pattern rank_pattern
    alpha_pattern megatron_core use_dora qalora_group_size eva_config
    ensure_weight_tying runtime_config
"""
# Beginnings that leave the base weights as they are; others subtract from them.
STARTS = (True, False, "gaussian", "orthogonal", "eva")


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter in peft's format."""
    file = folder / CONFIG
    return file.is_file() and "peft_type" in read_json(file)


def read(folder: Path) -> tuple[dict[str, mx.array], dict]:
    """Tensors by mlx-lm's names and mlx-lm's adapter config of a peft folder.

    Layers of a smaller rank get zeros up to the largest, which add nothing; where
    scales differ the one in the config is 1 and every B is multiplied by its own.

    Raises:
        UserError: a kind of adapter that mlx-lm does not have, or a damaged one.
    """
    place = str(folder)
    config = read_json(folder / CONFIG)
    _require_known(config, place)
    file = folder / WEIGHTS
    if not file.is_file():
        raise UserError(f"this adapter has no {WEIGHTS}", place=place)
    read_header(file)
    layers: dict[str, dict[str, mx.array]] = {}
    for name, value in mx.load(str(file)).items():
        path, leaf = _path(name, place)
        own, turned = LEAVES[leaf]
        layers.setdefault(path, {})[own] = value.T if turned else value
    wanted = {"lora_a", "lora_b", *(["m"] if config.get("use_dora") else [])}
    for path, own in layers.items():
        if own.keys() != wanted or own["lora_a"].shape[1] != len(own["lora_b"]):
            raise UserError(f"the adapter of {path} is not whole", place=place)
    if not layers:
        raise UserError("this adapter has no matrices", place=place)
    return _joined(layers, config)


def _joined(layers: dict[str, dict[str, mx.array]], config: dict):
    scales = {path: _scale(path, own, config) for path, own in layers.items()}
    rank = max(len(own["lora_b"]) for own in layers.values())
    scale = next(iter(scales.values())) if len(set(scales.values())) == 1 else 1.0
    tensors = {}
    for path, own in layers.items():
        missing = rank - len(own["lora_b"])
        tensors[f"{path}.lora_a"] = mx.pad(own["lora_a"], [(0, 0), (0, missing)])
        b = own["lora_b"]
        if scales[path] != scale:
            b = (scales[path] / scale) * b.astype(mx.float32)
        tensors[f"{path}.lora_b"] = mx.pad(b, [(0, missing), (0, 0)])
        if "m" in own:
            tensors[f"{path}.m"] = own["m"]
    return tensors, {
        "fine_tune_type": "dora" if config.get("use_dora") else "lora",
        "num_layers": _blocks(layers),
        "lora_parameters": {
            "rank": rank,
            "scale": scale,
            "dropout": config.get("lora_dropout") or 0.0,
            # Whole paths: no other block gets an adapter.
            "keys": sorted(layers),
        },
    }


def resolve_adapter(source: str | Path) -> Path:
    """The folder of an adapter in mlx-lm's format: itself, or what is made of peft's.

    Raises:
        UserError: no adapter, or one that mlx-lm does not have.
    """
    folder = Path(source).expanduser()
    if not (folder / CONFIG).is_file():
        raise UserError(f"the adapter does not load: no {CONFIG}", place=str(source))
    if not is_adapter(folder):
        return folder
    files = [folder / name for name in (CONFIG, WEIGHTS) if (folder / name).is_file()]
    facts = {file.name: cache.file_hash(file) for file in files}

    def fill(target: Path) -> dict:
        convert(folder, target)
        return {"source": folder.name}

    key = cache.key_of(["peft", VERSION, facts])
    size = sum(file.stat().st_size for file in files)
    return cache.get_or_create(
        "imports", key, fill, warning=warnings.warn, space=2 * size
    ).folder


def convert(source: Path, target: Path) -> None:
    """Write the adapter of a peft folder into an empty one, in mlx-lm's format.

    Raises:
        UserError: see `read`.
    """
    tensors, config = read(source)
    turned = {name: mx.contiguous(value) for name, value in tensors.items()}
    mx.save_safetensors(str(target / "adapters.safetensors"), turned)
    (target / CONFIG).write_text(json.dumps(config, indent=4) + "\n")


def _require_known(config: dict, place: str) -> None:
    kind, known = config.get("peft_type"), KNOWN.split()
    strange = [key for key, value in config.items() if value and key not in known]
    if config.get("bias", "none") != "none":
        strange.append("bias")
    if config.get("init_lora_weights", True) not in STARTS:
        strange.append("init_lora_weights")
    if kind != "LORA" or strange:
        what = f"{strange[0]}: {config[strange[0]]}" if strange else f"type {kind}"
        raise UserError(f"peft adapters with {what} are not read here", place=place)


def _path(name: str, place: str) -> tuple[str, str]:
    for leaf in LEAVES:
        if name.startswith(PREFIX) and name.endswith(f".{leaf}"):
            return name[len(PREFIX) : -len(leaf) - 1], leaf
    raise UserError(
        f"the tensor {name} is no matrix of a linear layer's adapter",
        place=place,
        hint="embeddings, experts and layers trained in full have none in mlx-lm",
    )


def _scale(path: str, own: dict[str, mx.array], config: dict) -> float:
    rank = len(own["lora_b"])
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            alpha = value
            break
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _blocks(paths: Iterable[str]) -> int:
    found = (re.search(r"\.layers\.(\d+)\.", path) for path in paths)
    return 1 + max((int(number[1]) for number in found if number), default=0)
