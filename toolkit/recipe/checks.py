"""What the schema cannot see: files that are missing, stages that contradict."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .faults import Keys
from .messages import Complaint, nearest

Find = Callable[[str], Path | None]

BUILTIN = "builtin:"
GGUF = ".gguf"
FILE_SUFFIXES = (".jsonl", ".json", ".txt", ".parquet", ".csv", ".gguf", ".safetensors")


def complaints(data: dict, find: Find) -> list[Complaint]:
    """Every fault of a recipe's raw data that needs more than one key, or a file."""
    stages = list(_stages(data))
    return [
        *_model(data, find),
        *_sources(data, find),
        *_rows(data, stages),
        *_order(data, stages, _is_quantized(data, find)),
    ]


def looks_local(source: str, find: Find) -> bool:
    """Whether a model or data source must be on this disk, rather than on the Hub."""
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        return True
    owner, slash, _ = source.partition("/")
    here = find(owner) if slash else None
    return source.endswith(FILE_SUFFIXES) or (here is not None and here.is_dir())


def model_path(data: dict) -> tuple[Keys, str | None]:
    """Where the recipe says the path of its model, and the path."""
    model = data.get("model")
    if isinstance(model, dict) and isinstance(model.get("path"), str):
        return ("model", "path"), model["path"]
    return ("model",), model if isinstance(model, str) else None


def _model(data: dict, find: Find) -> Iterator[Complaint]:
    where, source = model_path(data)
    model = data.get("model")
    found = find(source) if source else None
    if source and found is None and looks_local(source, find):
        yield _missing(where, source, find)
    elif found and not found.is_dir() and found.suffix != GGUF:
        yield Complaint(where, f"a model is a folder; '{source}' is a file")
    elif found and found.is_dir() and not _holds_model(found):
        yield Complaint(
            where, f"the folder '{source}' is not a model: it has no config.json"
        )
    local = found is not None or (isinstance(model, dict) and model.get("fresh"))
    if local and isinstance(model, dict) and model.get("revision") is not None:
        hint = "a revision belongs to a Hub id"
        yield Complaint(("model", "revision"), "this model is not on the Hub", hint)


def _holds_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or any(folder.glob(f"*{GGUF}"))


def _sources(data: dict, find: Find) -> Iterator[Complaint]:
    for where, source in _named(data.get("data")):
        if source.startswith(BUILTIN):
            from ..data.corpus import BUILTINS

            if (name := source.removeprefix(BUILTIN)) not in BUILTINS:
                hint = nearest(name, BUILTINS)
                yield Complaint(where, f"unknown built-in data '{name}'", hint)
        elif looks_local(source, find) and find(source) is None:
            yield _missing(where, source, find)


def _named(block: Any) -> Iterator[tuple[Keys, str]]:
    for split in ("train", "valid"):
        sources = block.get(split) if isinstance(block, dict) else None
        if isinstance(sources, str):
            yield ("data", split), sources
        elif isinstance(sources, list):
            for index, source in enumerate(sources):
                if isinstance(source, str):
                    yield ("data", split, index), source


def _missing(where: Keys, source: str, find: Find) -> Complaint:
    folder = find(str(Path(source).parent))
    names = [p.name for p in folder.iterdir()] if folder and folder.is_dir() else []
    hint = nearest(Path(source).name, names)
    if not (hint or "").startswith("did"):
        hint = "a relative path starts at the working directory, else beside recipes/"
    return Complaint(where, f"no such file or folder: '{source}'", hint)


def _stages(data: dict) -> Iterator[tuple[Keys, str, dict]]:
    stages = data.get("stages")
    for index, stage in enumerate(stages if isinstance(stages, list) else []):
        if isinstance(stage, dict) and len(stage) == 1:
            kind, block = next(iter(stage.items()))
            yield (
                ("stages", index, kind),
                kind,
                block if isinstance(block, dict) else {},
            )


def _rows(data: dict, stages: list) -> Iterator[Complaint]:
    block = data.get("data")
    block = block if isinstance(block, dict) else {}
    for where, kind, _ in stages:
        if kind == "train" and not block.get("train"):
            hint = "name rows to train on in data.train"
            yield Complaint(where, "nothing to train on", hint, of="key")
        if kind == "validate" and not (block.get("valid") or block.get("train")):
            hint = "name rows in data.valid or data.train"
            yield Complaint(where, "nothing to measure on", hint, of="key")


def _order(data: dict, stages: list, quantized: bool) -> Iterator[Complaint]:
    """Stages that cannot follow what came before them."""
    model = data.get("model")
    blank = isinstance(model, dict) and model.get("fresh") is not None
    for where, kind, block in stages:
        if blank and kind in ("quantize", "validate", "export"):
            hint = "begin with a train stage"
            yield Complaint(
                where, "a fresh model has learnt nothing yet", hint, "block"
            )
        if blank and kind == "train" and block.get("adapter") is not None:
            hint = "leave adapter out: a fresh model is trained in full"
            path = (*where, "adapter")
            yield Complaint(path, "an adapter needs a trained model", hint, "key")
        if quantized and kind == "quantize":
            hint = "rounding twice adds error; keep one quantization"
            yield Complaint(where, "the model is already quantized here", hint, "key")
        rounds = block.get("quantization") is not None
        adapts = block.get("adapter") is not None and not rounds
        if quantized and kind == "train" and not adapts:
            message = "of a quantized model only an adapter can be trained"
            hint = "add `adapter:`, without `quantization:`; or train first"
            yield Complaint(where, message, hint, "key")
        blank = False
        if kind == "train":
            # An adapter is fused into expanded weights.
            quantized = rounds or (quantized and not adapts)
        quantized = quantized or kind == "quantize"


def _is_quantized(data: dict, find: Find) -> bool:
    _, source = model_path(data)
    found = find(source) if source else None
    if found and found.suffix == GGUF and found.is_file():
        from ..model.foreign.gguf import is_quantized

        return is_quantized(found)
    config = read_config(found)
    return "quantization" in config or "quantization_config" in config


def read_config(folder: Path | None) -> dict:
    """A checkpoint's config.json; empty when there is none that can be read."""
    try:
        config = json.loads((folder / "config.json").read_text()) if folder else {}
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
