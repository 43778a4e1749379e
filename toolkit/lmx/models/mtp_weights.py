"""The multi-token-prediction (MTP) heads in checkpoints of the Qwen3-Next family.

mlx-lm drops the tensors `mtp.*`. Here they stay beside the model, in `mtp.safetensors`:
mlx-lm reads only model*.safetensors, and mlx-vlm's `split_mtp` reads
every file. The index of the model does not name it.

Hugging Face stores the norms of these models as offsets from one, and the projections
of experts joined or one by one. MLX's layout has the norms themselves and stacked
experts. Like mlx-vlm, this module takes a file for MLX's if its metadata says
`format: mlx`.
"""

import re
from pathlib import Path

import mlx.core as mx

from ..errors import UserError
from ..run.fs import copy_file
from . import global_scale
from .checkpoint import GRID_TENSORS, tensor_files
from .safetensors_io import read_header, write_safetensors

MTP_FILE = "mtp.safetensors"
PREFIX = "mtp."
MODEL_TYPES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
# A folder that mlx-vlm made of a head alone. Its tensors have no prefix.
SPLIT_MODEL_TYPE = "qwen3_5_mtp"
JOINED_EXPERTS = re.compile(r"(.*)\.experts\.(gate_up_proj|down_proj)")
SINGLE_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.weight")


def read_mtp(folder: Path, config: dict) -> dict[str, mx.array]:
    """The tensors of a checkpoint's MTP head in MLX's layout, unread.

    Returns:
        tensors by their names after `mtp.`; none if the checkpoint has no head, or one
        of another family. All tensors of a folder that mlx-vlm split off.

    Raises:
        UserError: a file is damaged, or an expert is missing.
    """
    tensors: dict[str, mx.array] = {}
    for file in _mtp_files(folder, config):
        arrays, is_mlx = _load(file)
        if config["model_type"] != SPLIT_MODEL_TYPE:
            arrays = {n: v for n, v in arrays.items() if n.startswith(PREFIX)}
        tensors |= arrays if is_mlx else as_mlx(arrays, place=str(folder))
    return {name.removeprefix(PREFIX): value for name, value in tensors.items()}


def as_mlx(tensors: dict[str, mx.array], *, place: str) -> dict[str, mx.array]:
    """The tensors of a head in Hugging Face's layout, in MLX's.

    Args:
        tensors: by their full names.

    Raises:
        UserError: an expert is missing.
    """
    # Only the weights of norms are vectors.
    is_norm = {n: n.endswith(".weight") and v.ndim == 1 for n, v in tensors.items()}
    tensors = {n: v + 1 if is_norm[n] else v for n, v in tensors.items()}
    return _stack_experts(tensors, place)


def copy_mtp(source: Path, target: Path, config: dict) -> None:
    """Write the MTP head of a checkpoint, if it has one, into another folder.

    Quantized layers are dequantized: the `quantization` of the other model's config
    need not have their grid.

    Args:
        config: that of the source.

    Raises:
        UserError: a file is damaged, an expert is missing, or a value is not finite.
    """
    tensors = read_mtp(source, config)
    if not tensors:
        return
    paths, file = quantized_layers(tensors), source / MTP_FILE
    if not paths and _mtp_files(source, config) == [file] and _load(file)[1]:
        copy_file(file, target / MTP_FILE)
        return
    for path in paths:
        names = {leaf: f"{path}.{leaf}" for leaf in ("weight", *GRID_TENSORS)}
        parts = {k: tensors.pop(name) for k, name in names.items() if name in tensors}
        tensors[names["weight"]] = dequantize(parts, layer_grid(path, config))
    renamed = {f"{PREFIX}{name}": value for name, value in tensors.items()}
    tensors.clear()
    write_mtp(target, renamed)


def write_mtp(folder: Path, tensors: dict[str, mx.array]) -> None:
    """Write a head in MLX's layout beside a model. The dictionary is emptied.

    Raises:
        UserError: a value is not finite.
    """
    write_safetensors(folder / MTP_FILE, tensors)


def quantized_layers(tensors: dict[str, mx.array]) -> list[str]:
    """Paths of the layers whose weights are codes."""
    scales = (name for name in tensors if name.endswith(".scales"))
    return [name.removesuffix(".scales") for name in scales]


def layer_grid(path: str, config: dict) -> dict:
    """`group_size`, `bits` and `mode` of a quantized layer of the head, and
    `global_scale` if it has one.

    Raises:
        UserError: the config has no such numbers.
    """
    block = config.get("quantization") or {}
    layer = block.get(f"{PREFIX}{path}", block.get(path))
    grid = block | (layer if isinstance(layer, dict) else {})
    if "bits" not in grid or "group_size" not in grid:
        raise UserError(f"{PREFIX}{path} has scales, but the config has no grid for it")
    return {
        "group_size": grid["group_size"],
        "bits": grid["bits"],
        "mode": grid.get("mode", "affine"),
    } | ({"global_scale": True} if grid.get("global_scale") else {})


def dequantize(parts: dict[str, mx.array], grid: dict) -> mx.array:
    """The weight of a layer, in the type of its scales; bfloat16 if these are codes.

    Args:
        parts: `weight` (codes), `scales`, `biases` if affine, and `global_scale` if
            the grid has it.
        grid: as from `layer_grid`.
    """
    if grid.get("global_scale"):
        parts = [parts[name] for name in ("weight", "scales", "global_scale")]
        return global_scale.dequantize(*parts).astype(mx.bfloat16)
    dtype = parts["scales"].dtype
    if not mx.issubdtype(dtype, mx.floating):
        return mx.dequantize(parts["weight"], parts["scales"], **grid)
    # Biases and scaled codes cancel, so that 16 bits would round away much.
    values = (parts[name].astype(mx.float32) for name in ("scales", "biases"))
    return mx.dequantize(parts["weight"], *values, **grid).astype(dtype)


def _mtp_files(folder: Path, config: dict) -> list[Path]:
    """The files with tensors of the head; those of the model come before others."""
    kind = config.get("model_type")
    if kind not in (*MODEL_TYPES, SPLIT_MODEL_TYPE):
        return []
    in_model = tensor_files(folder)
    if kind == SPLIT_MODEL_TYPE:
        return sorted(set(in_model.values()))
    files = {in_model[name] for name in in_model if name.startswith(PREFIX)}
    return sorted(files or filter(_has_mtp, folder.glob("mtp*.safetensors")))


def _load(file: Path) -> tuple[dict[str, mx.array], bool]:
    """The tensors of a file, unread, and whether they are in MLX's layout."""
    tensors, metadata = mx.load(str(file), return_metadata=True)
    return tensors, metadata.get("format") == "mlx"


def _has_mtp(file: Path) -> bool:
    return any(name.startswith(PREFIX) for name in read_header(file))


def _stack_experts(tensors: dict[str, mx.array], place: str) -> dict[str, mx.array]:
    """Experts by mlx-lm's names, each projection of all experts in one tensor."""
    stacked: dict[str, mx.array] = {}
    single: dict[str, dict[int, mx.array]] = {}
    for name, value in tensors.items():
        if match := SINGLE_EXPERT.fullmatch(name):
            block, index, layer = match.groups()
            path = f"{block}.switch_mlp.{layer}.weight"
            single.setdefault(path, {})[int(index)] = value
        elif match := JOINED_EXPERTS.fullmatch(name):
            block, layer = match.groups()
            layers = ("gate_proj", "up_proj") if "gate" in layer else (layer,)
            parts = mx.split(value, len(layers), axis=-2)
            for layer, part in zip(layers, parts, strict=True):
                stacked[f"{block}.switch_mlp.{layer}.weight"] = part
        else:
            stacked[name] = value
    for path, experts in single.items():
        if experts.keys() != set(range(len(experts))):
            raise UserError(f"an expert of {path} is missing", place=place)
        stacked[path] = mx.stack([experts[index] for index in range(len(experts))])
    return stacked
