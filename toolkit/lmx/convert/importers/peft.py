"""Adapters of Hugging Face's peft (LoRA, rsLoRA, DoRA) in mlx-lm's format.

peft stores A [rank, in] and B [out, rank]; mlx-lm stores their transposes. peft's scale
is alpha / rank, or alpha / sqrt(rank) with `use_rslora`.
"""

import math
import os
import re
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import mlx.core as mx
from pydantic import ConfigDict, Field, model_validator

from ...config.validation import FileConfig, shown
from ...data import cache
from ...errors import UserError, shorten
from ...files.json_files import read_json
from ...models.lora.io import with_one_rank, write_adapter
from ...models.lora.layers import LoRALinear
from ...models.safetensors_io import read_tensors

# Part of the cache key; changes when an import writes other values.
VERSION = 2
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# mlx-lm's name of a tensor and whether it is transposed, by peft's name.
LEAVES = {
    "lora_A.weight": ("lora_a", True),
    "lora_B.weight": ("lora_b", True),
    "lora_magnitude_vector": ("m", False),
}
STORED_BASE = (
    "peft stored the base model's layer beside its adapter; lmx cannot tell whether it "
    "was changed. Save the adapter again in peft with "
    "save_pretrained(folder, save_embedding_layers=False)"
)
LINEAR = "adapters of embeddings, experts and fully trained layers are not supported"
# Settings that do not change what a trained adapter computes.
HARMLESS_KEYS = """
    task_type auto_mapping peft_version base_model_name_or_path revision inference_mode
    layers_pattern megatron_core qalora_group_size eva_config ensure_weight_tying
    runtime_config
"""


class PeftConfig(FileConfig):
    """peft's adapter_config.json: what is read, with the values that lmx supports."""

    model_config = ConfigDict(extra="allow")

    peft_type: Literal["LORA"]
    r: Annotated[int, Field(ge=1, lt=2**31)]
    lora_alpha: float
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    bias: Literal["none"] = "none"
    # Others change the base weights.
    init_lora_weights: Literal[True, False, "gaussian", "orthogonal", "eva"] = True

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        for key, value in self.model_extra.items():
            if value and key not in HARMLESS_KEYS.split():
                raise ValueError(f"{shorten(key)}: {shown(value)} is not supported")
        for pattern in (*(self.rank_pattern or {}), *(self.alpha_pattern or {})):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern} is no pattern: {error}") from None
        return self


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
    config_file, file = folder / CONFIG, folder / WEIGHTS
    config = PeftConfig.read(read_json(config_file), place=str(config_file))
    if not file.is_file():
        raise UserError(f"this adapter has no {WEIGHTS}", place=str(folder))
    layers: dict[str, dict[str, mx.array]] = {}
    for name, value in read_tensors(file).items():
        leaf = next((leaf for leaf in LEAVES if name.endswith(f".{leaf}")), None)
        if leaf is None or not name.startswith(PREFIX):
            raise UserError(
                f"the tensor {name} does not belong to the adapter of a linear layer",
                place=str(file),
                hint=STORED_BASE if name.endswith(".base_layer.weight") else LINEAR,
            )
        path = name[len(PREFIX) : -len(leaf) - 1]
        name, transposed = LEAVES[leaf]
        layers.setdefault(path, {})[name] = value.T if transposed else value
    leaves = {"lora_a", "lora_b", *(["m"] if config.use_dora else [])}
    for path, layer in layers.items():
        rank = _by_pattern(config.rank_pattern, path, config.r)
        a, b = (layer[n].shape if n in layer else () for n in ("lora_a", "lora_b"))
        are_floats = all(mx.issubdtype(v.dtype, mx.floating) for v in layer.values())
        has_rank = a[1:] == (rank,) and b[:1] == (rank,)
        if layer.keys() != leaves or not has_rank or not are_floats:
            message = (
                f"the adapter of {path} is incomplete, or no floats of rank {rank}"
            )
            raise UserError(message, place=str(file))
    if not layers:
        raise UserError("this adapter has no matrices", place=str(file))
    scales = {}
    for path, layer in layers.items():
        rank = len(layer["lora_b"])
        alpha = _by_pattern(config.alpha_pattern, path, config.lora_alpha)
        scales[path] = alpha / (math.sqrt(rank) if config.use_rslora else rank)
    axes = dict.fromkeys(layers, LoRALinear.RANK_AXIS)
    tensors, lora = with_one_rank(layers, scales, axes)
    is_partial = config.exclude_modules or config.layers_to_transform is not None
    is_known = isinstance(config.target_modules, list) and not is_partial
    numbers = (re.search(r"\.layers\.(\d+)\.", path) for path in layers)
    blocks = [int(number[1]) for number in numbers if number]
    # Full paths, so that no other block gets an adapter.
    lora |= {"dropout": config.lora_dropout or 0.0, "keys": sorted(layers)}
    return tensors, {
        "fine_tune_type": "dora" if config.use_dora else "lora",
        "num_layers": 1 + max(blocks, default=0),
        "lora_parameters": lora,
        "peft_target_modules": config.target_modules if is_known else [],
    }


def resolve_adapter(source: str | Path) -> Path:
    """The folder of an adapter in mlx-lm's format; peft's is converted in the cache.

    Raises:
        UserError: there is no adapter, or mlx-lm has no such adapter.
    """
    folder = Path(os.path.expanduser(source))
    if not os.path.isfile(folder / CONFIG):
        raise UserError(f"the adapter does not load: no {CONFIG}", place=str(source))
    if not is_adapter(folder):
        return folder
    files = [folder / name for name in (CONFIG, WEIGHTS) if (folder / name).is_file()]
    # A damaged file may have any size, and all of it would be hashed.
    read(folder)
    facts = {file.name: cache.file_hash(file) for file in files}

    def fill(target: Path) -> dict:
        convert_adapter(folder, target)
        return {"source": folder.name}

    key = cache.key_of(["peft", VERSION, facts])
    size = sum(file.stat().st_size for file in files)
    store = cache.store(warnings.warn)
    return store.get_or_make("imports", key, fill, space=2 * size).folder


def convert_adapter(source: Path, target: Path) -> None:
    """Write the adapter of a peft folder into an empty folder in mlx-lm's format.

    Raises:
        UserError: see `read`.
    """
    tensors, config = read(source)
    write_adapter(target, tensors, {}, **config)


def _by_pattern(patterns: dict[str, Any] | None, path: str, default: Any) -> Any:
    """The value of the first pattern that the end of a path matches."""
    matching = (
        value
        for pattern, value in (patterns or {}).items()
        if re.match(rf"(.*\.)?({pattern})$", path)
    )
    return next(matching, default)
