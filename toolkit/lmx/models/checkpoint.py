"""Checkpoint folders, read and checked before any weight is loaded."""

import copy
import hashlib
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..data.cache import file_hash
from ..errors import UserError
from ..files.atomic import require_own_entries
from ..files.json_files import read_json
from .config_check import BITS, check_config, check_sizes
from .rope_parameters import in_both_spellings
from .safetensors_io import DTYPE_BYTES, DTYPE_NAMES, read_header, read_tensors

# Tensors of a quantized layer besides its codes.
GRID_TENSORS = ("scales", "biases", "global_scale")
INDEX_FILE = "model.safetensors.index.json"
# Types of codes, which belong to scales of another type.
INTEGERS = {name for name in DTYPE_NAMES.values() if name[0] in "UI"} | {"BOOL"}
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
PICKLE_HINT = (
    "if you trust them, load them with transformers and save_pretrained() them; for "
    "models of the Hub, huggingface.co/spaces/safetensors/convert makes a revision"
)


# Tables computed from the config, which older programs stored with the weights.
BUFFERS = re.compile(r"(rotary\w*\.inv_freq|\.masked_bias|embeddings\.position_ids)$")
# Tensors of images and sound, of prediction of several tokens, and computed ones.
OTHER_PARTS = re.compile(
    r"mtp|vis|audio|image|multi_modal|rotary|inv_freq|attn\.(masked_)?bias$|scale|lm_head|position_ids"
)
LAYER = re.compile(r"layers\.(\d+)\.")
HEAD, EMBEDDING = "lm_head.", "model.embed_tokens."
EMBEDDING_WEIGHT = "embed_tokens.weight"


def model_folder(model: str) -> str:
    """The checkpoint in model/ of a run directory; any other name as it is."""
    folder = os.path.expanduser(model)
    inner = os.path.join(folder, "model")
    # Unlike pathlib's, it does not raise if the name is too long.
    is_checkpoint = os.path.isfile(os.path.join(folder, "config.json"))
    is_run = not is_checkpoint and os.path.isfile(os.path.join(inner, "config.json"))
    return inner if is_run else model


def read_config(path: Path) -> dict:
    """The config.json of a checkpoint folder, RoPE in both spellings.

    Raises:
        UserError: it is missing, or it is no model's, or a value is of a wrong type or
            out of range, or a link leaves the folder.
    """
    file = path / "config.json"
    if not os.path.isfile(file):
        raise UserError(
            "this folder is not a model: it has no config.json", place=str(path)
        )
    require_own_files(path)
    config = read_json(file)
    if not isinstance(config.get("model_type"), str):
        raise UserError("the config names no model_type", place=str(file))
    config = in_both_spellings(config, str(file))
    check_config(config, str(file))
    return config


def require_own_files(folder: Path) -> None:
    """Refuse links that leave a model folder, except to the blobs of the Hub's cache.

    Raises:
        UserError: a link leads to another place.
    """
    snapshots = folder.resolve().parent
    blobs = [snapshots.parent / "blobs"] if snapshots.name == "snapshots" else []
    require_own_entries(folder, "model folder", more=blobs, dangling=False)


def config_int(config: dict, name: str) -> int:
    """A number of a config, of its language part if it has several; else 0."""
    value = (config | (config.get("text_config") or {})).get(name)
    return value if isinstance(value, int) else 0


def check_weights(path: Path, config: dict) -> None:
    """Refuse a folder without weights, with a damaged file, or of another config.

    Raises:
        UserError: naming the file.
    """
    if files := tensor_files(path):
        weights = set(files.values())
        tensors = {n: t for file in weights for n, t in read_header(file).items()}
        if all(tensor.dtype in INTEGERS for tensor in tensors.values()):
            raise UserError(
                "all tensors are integers, so these are no weights of a model",
                place=str(next(iter(files.values()))),
                hint="copy the weight files again",
            )
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        check_sizes(config, shapes, str(path / "config.json"))
        return
    files = [file.name for file in path.iterdir()]
    pickles = sorted(name for name in files if Path(name).suffix in PICKLE_SUFFIXES)
    # Only the index of a pickled Hub model is downloaded.
    pickles += [name for name in files if name.endswith(".bin.index.json")]
    if pickles:
        raise UserError(
            f"no model*.safetensors here, only pickles ({pickles[0]}), "
            "which can run any program and are never loaded",
            place=str(path),
            hint=PICKLE_HINT,
        )
    raise UserError("no model*.safetensors here", place=str(path))


def tensor_files(path: Path) -> dict[str, Path]:
    """The file of every tensor.

    A correct index decides which files belong to the model; a wrong one is ignored.

    Raises:
        UserError: a file is damaged, or the folder has files of several models.
    """
    files = sorted(path.glob("model*.safetensors"))
    headers = {file: read_header(file) for file in files}
    indexed = {name: path / file for name, file in _weight_map(path).items()}
    if indexed and all(name in headers.get(file, ()) for name, file in indexed.items()):
        files = [file for file in files if file in set(indexed.values())]
    else:
        indexed = {}
    tensors = dict(indexed)
    for file in files:
        for name in headers[file]:
            if tensors.setdefault(name, file) != file and name not in indexed:
                raise UserError(
                    f"{name} is in {tensors[name].name} too: the files of two models?",
                    place=str(file),
                    hint="remove one model's files, or give the index of the other's",
                )
    return tensors


def missing_shards(path: Path) -> list[str]:
    """Files that the index names and the folder lacks."""
    names = set(_weight_map(path).values())
    return sorted(names - {file.name for file in path.iterdir() if file.is_file()})


def _weight_map(path: Path) -> dict[str, str]:
    """File names by tensor from the index; empty if the index is missing or broken."""
    try:
        files = read_json(path / INDEX_FILE).get("weight_map")
    except (OSError, UserError):
        return {}
    files = files if isinstance(files, dict) else {}
    return files if all(isinstance(file, str) for file in files.values()) else {}


def weights_digest(path: Path) -> str:
    """Sha256 of the config and the weights of a checkpoint or an adapter.

    Whole files, each read once: see `file_hash`.
    """
    configs = (path / name for name in ("config.json", "adapter_config.json"))
    files = [*filter(Path.is_file, configs), *sorted(path.glob("*.safetensors"))]
    return hashlib.sha256("".join(map(file_hash, files)).encode()).hexdigest()


@dataclass(frozen=True)
class CheckpointSize:
    """Size of a checkpoint.

    Attributes:
        parameters: a quantized weight counts as one.
        float_values: stored floating-point values: parameters that are not quantized,
            and the scales and biases of affine codes.
        grids: bits, group_size and mode of every quantized layer, by path.
    """

    parameters: int
    bytes: int
    float_values: int
    grids: dict[str, dict]

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / self.parameters


def checkpoint_size(folder: Path) -> CheckpointSize:
    """Count from the headers, without loading any weight.

    Raises:
        UserError: a weight file is damaged.
    """
    tensors = {}
    for file in sorted(folder.glob("model*.safetensors")):
        tensors |= read_header(file)
    quantization = read_json(folder / "config.json").get("quantization") or {}
    parameters = float_values = 0
    grids = {}
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        count = math.prod(tensor.shape)
        if tensor.dtype not in INTEGERS:
            float_values += count
        is_packed = f"{path}.scales" in tensors
        if is_packed and leaf in GRID_TENSORS:
            continue
        if is_packed and leaf == "weight":
            layer = quantization.get(path)
            grid = quantization | (layer if isinstance(layer, dict) else {})
            if "bits" not in grid:
                raise UserError(
                    f"{path} has scales, but quantization has no bits for it",
                    place=str(folder / "config.json"),
                )
            count = count * 32 // grid["bits"]
            grids[path] = grid
        parameters += count
    size = sum(math.prod(t.shape) * DTYPE_BYTES[t.dtype] for t in tensors.values())
    return CheckpointSize(parameters, size, float_values, grids)


# mlx-lm's choice of a model's class and arguments class by its config.
ModelClasses = Callable[[dict], tuple[Callable[[Any], nn.Module], type]]


def load_options(path: Path, config: dict, classes: ModelClasses) -> dict[str, Any]:
    """Arguments for mlx-lm's `load_model` of a folder.

    Raises:
        UserError: a file is damaged, or the folder has files of several models.
    """
    files = tensor_files(path)
    head = head_config(config, files, lambda n: mx.load(str(files[n]))[n], str(path))

    def fixed_classes(config: dict) -> tuple[Callable[[Any], nn.Module], type]:
        """Classes whose models get the fixed tensors of `path` through `sanitize`."""
        model_class, arguments_class = classes(config)

        def build(arguments: Any) -> nn.Module:
            model = model_class(arguments)
            original = getattr(model, "sanitize", lambda weights: weights)
            parameters = {name for name, _ in tree_flatten(model.parameters())}

            def sanitize(_: dict[str, mx.array]) -> dict[str, mx.array]:
                # A model is read once; after that the class has its own method again.
                del model.sanitize
                given = _fixed_tensors(path, parameters)
                # mlx-lm changes some dicts in place.
                weights = original(dict(given))
                _name_dropped(given, weights, config_int(config, "num_hidden_layers"))
                _check_codes(model, weights, path)
                return weights

            model.sanitize = sanitize
            return model

        return build, arguments_class

    return {
        "model_config": copy.deepcopy(config) | head,
        "get_model_classes": fixed_classes,
    }


def head_config(
    config: dict, names: Iterable[str], read: Callable[[str], mx.array], place: str
) -> dict:
    """`tie_word_embeddings`, as the tensors in the files say.

    mlx-lm ties the head of many models whose config does not say so, and drops a stored
    head. Hugging Face's programs store no head where it is tied, and keep one whose
    values differ.
    """
    key, names = "tie_word_embeddings", list(names)
    heads = [name for name in names if name.endswith(f"{HEAD}weight")]
    embeddings = [name for name in names if name.endswith(EMBEDDING_WEIGHT)]
    if not heads or not embeddings:
        return {}
    # The longer names are those of other parts, such as an audio decoder.
    head, embedding = (min(names, key=len) for names in (heads, embeddings))
    text = config.get("text_config") or {}
    if (config | text).get(key):
        if mx.array_equal(read(head), read(embedding)).item():
            return {}
        values = f"{head} has other values than {embedding}"
        warnings.warn(
            f"{place}: {key} is true, but {values}: both are used", stacklevel=2
        )
    return {key: False} | ({"text_config": text | {key: False}} if text else {})


def _name_dropped(given: dict, kept: dict, num_layers: int) -> None:
    """Warn of tensors that mlx-lm drops although they may belong to the model."""
    arrays = {id(value) for value in given.values()}
    made = {name: value for name, value in kept.items() if id(value) not in arrays}
    arrays = {id(value) for value in kept.values()}
    lost = {
        name: value
        for name, value in given.items()
        if id(value) not in arrays and name not in kept and not OTHER_PARTS.search(name)
        # Layers beyond the last one predict several tokens.
        if not num_layers or max(map(int, LAYER.findall(name)), default=0) < num_layers
    }
    # Merged and divided tensors have other names, and as many values.
    values = [sum(value.size for value in part.values()) for part in (lost, made)]
    leaves = {name.rpartition(".")[0].rpartition(".")[2] for name in made}
    dropped = [n for n in lost if n.rpartition(".")[0].rpartition(".")[2] not in leaves]
    if dropped and values[0] > values[1]:
        text = f"mlx-lm does not read {len(dropped)} tensors, such as {dropped[0]}"
        warnings.warn(text, stacklevel=2)


def _check_codes(model: nn.Module, weights: dict[str, mx.array], path: Path) -> None:
    """Check the widths of codes and scales, by which mlx-lm divides.

    A group size of zero would end the process within MLX.

    Raises:
        UserError: naming the layer.
    """
    for name, module in model.named_modules():
        scales, codes = (weights.get(f"{name}.{leaf}") for leaf in ("scales", "weight"))
        if scales is None or codes is None or not hasattr(module, "to_quantized"):
            continue
        width = module.weight.shape[-1]
        words, groups = (t.shape[-1] if t.ndim else 0 for t in (codes, scales))
        if not groups or width % groups or words * 32 / width not in BITS:
            raise UserError(
                f"{name} has {words:,} words of codes and {groups:,} groups in a row, "
                f"which do not fit to the width {width:,} of the config",
                place=str(path),
                hint="copy config.json from the model that the weights belong to",
            )


def _fixed_tensors(path: Path, parameters: set[str]) -> dict[str, mx.array]:
    """The tensors of a folder, unread, each from the right file with the right name.

    Args:
        parameters: names of the model's own.
    """
    places = tensor_files(path)
    files = {file: read_tensors(file) for file in dict.fromkeys(places.values())}
    tensors = {
        name: files[file][name]
        for name, file in places.items()
        if name in parameters or not BUFFERS.search(name)
    }
    is_tied = not any(name.endswith(f"{HEAD}weight") for name in parameters)
    for name in [n for n in tensors if is_tied and HEAD in n]:
        prefix, _, leaf = name.rpartition(HEAD)
        embedding = f"{prefix}{EMBEDDING}{leaf}"
        if embedding not in tensors:
            tensors[embedding] = tensors.pop(name)
    return tensors
