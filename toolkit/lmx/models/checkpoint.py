"""What a checkpoint folder says of itself, read and checked before any weight is."""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

from ..data.cache import file_hash
from ..data.tokenizer_files import read_json
from ..errors import UserError
from .safetensors_io import read_header

SAMPLE = 1 << 20
"""Bytes at the end of a weight file that tell it from others of the same shapes."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt")
WAY_OUT = (
    "if you trust them, load them with transformers and save_pretrained() them; of "
    "models of the Hub, huggingface.co/spaces/safetensors/convert makes a revision"
)


def model_folder(model: str) -> str:
    """What the user named, or the checkpoint in model/ where that is a run folder."""
    folder = Path(model).expanduser()
    is_run = not (folder / "config.json").is_file()
    inner = folder / "model"
    return str(inner) if is_run and (inner / "config.json").is_file() else model


def read_config(path: Path) -> dict:
    """The config.json of a checkpoint folder.

    Raises:
        UserError: there is none, or it is no model's.
    """
    file = path / "config.json"
    if not file.is_file():
        raise UserError(
            "this folder is not a model: it has no config.json", place=str(path)
        )
    config = read_json(file)
    if not isinstance(config.get("model_type"), str):
        raise UserError("the config names no model_type", place=str(file))
    return config


def weights_digest(path: Path) -> str:
    """A hash of a checkpoint's weights and of what makes a model of them."""
    files = [path / "config.json", *sorted(path.glob("*.safetensors"))]
    return hashlib.sha256("".join(map(file_hash, files)).encode()).hexdigest()


def config_int(config: dict, name: str) -> int:
    """A number of a config, of its language part if it has several; else 0."""
    return (config | config.get("text_config", {})).get(name) or 0


def check_weights(path: Path) -> None:
    """Refuse a folder without weights or with a damaged file.

    Raises:
        UserError: naming the file.
    """
    if tensor_files(path):
        return
    files = [file.name for file in path.iterdir()]
    pickles = sorted(name for name in files if Path(name).suffix in PICKLES)
    # Of a pickled model of the Hub, the index alone is downloaded.
    pickles += [name for name in files if name.endswith(".bin.index.json")]
    if pickles:
        raise UserError(
            f"no model*.safetensors here, only pickles ({pickles[0]}), "
            "which can run any program and are never loaded",
            place=str(path),
            hint=WAY_OUT,
        )
    raise UserError("no model*.safetensors here", place=str(path))


def tensor_files(path: Path) -> dict[str, Path]:
    """The file of every tensor.

    An index that is right decides which files are of the model; a wrong one is as good
    as none.

    Raises:
        UserError: a file is damaged, or files of several models lie here.
    """
    files = sorted(path.glob("model*.safetensors"))
    held = {file: read_header(file) for file in files}
    listed = {name: path / file for name, file in _weight_map(path).items()}
    if listed and all(name in held.get(file, ()) for name, file in listed.items()):
        files = [file for file in files if file in set(listed.values())]
    else:
        listed = {}
    places = dict(listed)
    for file in files:
        for name in held[file]:
            if places.setdefault(name, file) != file and name not in listed:
                raise UserError(
                    f"{name} is in {places[name].name} too: the files of two models?",
                    place=str(file),
                    hint="remove one model's files, or give the index of the other's",
                )
    return places


def quick_digest(path: Path, adapter: Path | None = None) -> str:
    """What tells a checkpoint, with its adapter, from others, without reading it all.

    Sha256 of its configuration and, of every weight file, name, size, header and end.
    """
    total = hashlib.sha256()
    for folder in filter(None, [path, adapter]):
        files = sorted(folder.glob("*.safetensors"))
        for file in [*sorted(folder.glob("*config.json")), *files]:
            total.update(f"{file.name} {file.stat().st_size} ".encode())
            total.update(_digest_bytes(file))
    return total.hexdigest()


def _digest_bytes(file: Path) -> bytes:
    if file.suffix == ".json":
        return file.read_bytes()
    with file.open("rb") as stream:
        length = stream.read(8)
        header = stream.read(min(int.from_bytes(length, "little"), 100 << 20))
        stream.seek(max(0, file.stat().st_size - SAMPLE))
        return length + header + stream.read()


def missing_shards(path: Path) -> list[str]:
    """Files the index names that are not here."""
    names = set(_weight_map(path).values())
    return sorted(name for name in names if not (path / name).is_file())


def _weight_map(path: Path) -> dict[str, str]:
    """Names of files by tensor, as the index says; empty of one that says nothing."""
    try:
        places = read_json(path / "model.safetensors.index.json").get("weight_map")
    except (OSError, UserError):
        return {}
    places = places if isinstance(places, dict) else {}
    return places if all(isinstance(file, str) for file in places.values()) else {}


# --- from model.sizes: Parameters, bytes and bits per weight of a checkpoint, from its files' headers.


@dataclass(frozen=True)
class CheckpointSize:
    """What a checkpoint weighs; a quantized weight counts as one parameter."""

    parameters: int
    bytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / self.parameters


def checkpoint_size(folder: Path) -> CheckpointSize:
    """Count without loading any weight.

    Raises:
        UserError: a weight file is damaged.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = {}
    for file in sorted(folder.glob("model*.safetensors")):
        tensors |= read_header(file)
    quantization = config.get("quantization") or {}
    parameters = 0
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        is_packed = f"{path}.scales" in tensors
        if is_packed and leaf in ("scales", "biases"):
            continue
        count = math.prod(tensor["shape"])
        if is_packed and leaf == "weight":
            own = quantization.get(path)
            bits = (own if isinstance(own, dict) else quantization)["bits"]
            count = count * 32 // bits
        parameters += count
    places = [tensor["data_offsets"] for tensor in tensors.values()]
    size = sum(end - start for start, end in places)
    return CheckpointSize(parameters, size)
