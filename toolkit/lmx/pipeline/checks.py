"""What the schema cannot see: files that are missing, stages that contradict."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..config.errors import KeyPath
from ..config.messages import Problem, nearest
from ..config.qat import CONTINUES_FROM_CODES
from ..config.quant_spec import QuantizationConfig, QuantSpec
from ..convert.exporters import FORMATS
from ..errors import UserError

Find = Callable[[str], Path | None]

BUILTIN = "builtin:"
OF_DRAFTS = ("draft_model", "init_from"), ("benchmark", "baseline_model")
OTHERS = {"train": [("teacher", "model")], "draft": OF_DRAFTS}
GOING_ON = (
    f"quantizer: {', '.join(CONTINUES_FROM_CODES[:-1])} or {CONTINUES_FROM_CODES[-1]}"
)
GGUF = ".gguf"
FILE_SUFFIXES = (".jsonl", ".json", ".txt", ".parquet", ".csv", ".gguf", ".safetensors")


def complaints(data: dict, find: Find) -> list[Problem]:
    """Every fault of a recipe's raw data that needs more than one key, or a file."""
    stages = list(_stages(data))
    return [
        *_model(data, find),
        *_sources(data, find),
        *_rows(data, stages),
        *_others(stages, find),
        *_tasks(stages, find),
        *_order(data, stages, _quantization(data, find)),
        *_formats(data, stages, find),
    ]


def looks_local(source: str, find: Find) -> bool:
    """Whether a model or data source must be on this disk, rather than on the Hub."""
    name = source.partition("@")[0]
    if source.startswith((".", "/", "~")) or name.count("/") > 1:
        return True
    owner, slash, _ = name.partition("/")
    here = find(owner) if slash else None
    return source.endswith(FILE_SUFFIXES) or (here is not None and here.is_dir())


def model_path(data: dict) -> tuple[KeyPath, str | None]:
    """Where the recipe says the path of its model, and the path."""
    model = data.get("model")
    if isinstance(model, dict) and isinstance(model.get("path"), str):
        return ("model", "path"), model["path"]
    return ("model",), model if isinstance(model, str) else None


def _model(data: dict, find: Find) -> Iterator[Problem]:
    where, source = model_path(data)
    model = data.get("model")
    found = find(source) if source else None
    if source and found is None and looks_local(source, find):
        yield _missing(where, source, find)
    elif found and not found.is_dir() and found.suffix != GGUF:
        yield Problem(where, f"a model is a folder; '{source}' is a file")
    elif found and found.is_dir() and not _holds_model(found):
        yield Problem(
            where, f"the folder '{source}' is not a model: it has no config.json"
        )
    local = found is not None or (isinstance(model, dict) and model.get("from_scratch"))
    if local and isinstance(model, dict) and model.get("revision") is not None:
        hint = "a revision belongs to a Hub id"
        yield Problem(("model", "revision"), "this model is not on the Hub", hint)


def _holds_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or any(folder.glob(f"*{GGUF}"))


def _sources(data: dict, find: Find) -> Iterator[Problem]:
    for where, source in _named(data.get("data")):
        if source.startswith(BUILTIN):
            from ..data.builtin import BUILTINS

            if (name := source.removeprefix(BUILTIN)) not in BUILTINS:
                hint = nearest(name, BUILTINS)
                yield Problem(where, f"unknown built-in data '{name}'", hint)
        elif looks_local(source, find) and find(source) is None:
            yield _missing(where, source, find)


def _named(block: Any) -> Iterator[tuple[KeyPath, str]]:
    for split in ("train", "valid"):
        sources = block.get(split) if isinstance(block, dict) else None
        if isinstance(sources, str):
            yield ("data", split), sources
        elif isinstance(sources, list):
            for index, source in enumerate(sources):
                if isinstance(source, str):
                    yield ("data", split, index), source


def _missing(where: KeyPath, source: str, find: Find) -> Problem:
    folder = find(str(Path(source).parent))
    names = [p.name for p in folder.iterdir()] if folder and folder.is_dir() else []
    hint = nearest(Path(source).name, names)
    if not (hint or "").startswith("did"):
        hint = "a relative path starts at the working directory, else beside recipes/"
    return Problem(where, f"no such file or folder: '{source}'", hint)


def _stages(data: dict) -> Iterator[tuple[KeyPath, str, dict]]:
    stages = data.get("stages")
    for index, stage in enumerate(stages if isinstance(stages, list) else []):
        if isinstance(stage, dict) and len(stage) == 1:
            kind, block = next(iter(stage.items()))
            yield (
                ("stages", index, kind),
                kind,
                block if isinstance(block, dict) else {},
            )


def _rows(data: dict, stages: list) -> Iterator[Problem]:
    block = data.get("data")
    block = block if isinstance(block, dict) else {}
    for where, kind, _ in stages:
        if kind in ("train", "draft") and not block.get("train"):
            hint = "name rows to train on in data.train"
            yield Problem(where, "nothing to train on", hint, of="key")
        if kind == "evaluate" and not (block.get("valid") or block.get("train")):
            hint = "name rows in data.valid or data.train"
            yield Problem(where, "nothing to measure on", hint, of="key")


def _others(stages: list, find: Find) -> Iterator[Problem]:
    """Models that stages name beside the one they work on."""
    for where, kind, block in stages:
        for key, name in OTHERS.get(kind, ()):
            inner = block.get(key)
            source = inner.get(name) if isinstance(inner, dict) else None
            is_local = isinstance(source, str) and looks_local(source, find)
            if is_local and find(source) is None:
                yield _missing((*where, key, name), source, find)


def _tasks(stages: list, find: Find) -> Iterator[Problem]:
    """Tasks of the harness that cannot be measured here."""
    for where, kind, block in stages:
        tasks = block.get("tasks") if kind == "evaluate" else None
        if not isinstance(tasks, list) or not tasks:
            continue
        from ..evaluation.lm_eval import is_file, is_installed

        if not is_installed():
            hint = "pip install 'lmx-toolkit[eval]'"
            message = "lm-evaluation-harness is not installed"
            yield Problem((*where, "tasks"), message, hint, "key")
        for index, task in enumerate(tasks):
            if isinstance(task, str) and is_file(task) and find(task) is None:
                yield _missing((*where, "tasks", index), task, find)


def _order(data: dict, stages: list, quantized: dict | None) -> Iterator[Problem]:
    """Stages that cannot follow what came before them.

    Args:
        quantized: what was asked when the model was quantized; None = it is not.
    """
    model = data.get("model")
    blank = isinstance(model, dict) and model.get("from_scratch") is not None
    drafted = False
    for where, kind, block in stages:
        if drafted and kind in ("train", "quantize"):
            message = "the draft was distilled from the model before this stage"
            hint = "distil last, from the model that will be served"
            yield Problem(where, message, hint, "key")
        drafted |= kind == "draft"
        if blank and kind in ("quantize", "draft", "evaluate", "export"):
            hint = "begin with a train stage"
            yield Problem(where, "a fresh model has learnt nothing yet", hint, "block")
        if blank and kind == "train" and block.get("adapter") is not None:
            hint = "leave adapter out: a fresh model is trained in full"
            path = (*where, "adapter")
            yield Problem(path, "an adapter needs a trained model", hint, "key")
        elif kind == "train" and quantized is None and _keeps_codes(block):
            hint = "quantize it first, or use type: lora"
            message = "a qa_lora adapter is for a quantized model, and this is none"
            yield Problem((*where, "adapter"), message, hint, "key")
        if quantized is not None and kind == "quantize":
            hint = "rounding twice adds error; keep one quantization"
            yield Problem(where, "the model is already quantized here", hint, "key")
        rounding = block.get("qat")
        rounds = rounding is not None
        adapts = block.get("adapter") is not None and not rounds
        if quantized is not None and kind == "train" and rounds:
            yield from _rounding(where, block, quantized)
        elif quantized is not None and kind == "train" and not adapts:
            message = "of a quantized model only an adapter can be trained"
            hint = f"add `adapter:`, or `qat:` with {GOING_ON}; or train first"
            yield Problem(where, message, hint, "key")
        blank = False
        if kind == "train":
            # An adapter is fused into expanded weights, if not into biases.
            quantized = None if adapts and not _keeps_codes(block) else quantized
            quantized = _grid(rounding) if rounds else quantized
        quantized = _grid(block) if kind == "quantize" else quantized


def _keeps_codes(block: dict) -> bool:
    adapter = block.get("adapter")
    return isinstance(adapter, dict) and adapter.get("type") == "qa_lora"


def _rounding(where: KeyPath, block: dict, before: dict) -> Iterator[Problem]:
    """What of a quantization of a quantized model does not go on from its codes."""
    where, asked = (*where, "qat"), block["qat"]
    asked = asked if isinstance(asked, dict) else {}
    grid = asked.get("quantizer", "minmax")
    # An adapter keeps the grid unless it asks for another.
    keeps = grid == "minmax" and block.get("adapter") is not None
    if grid not in CONTINUES_FROM_CODES and not keeps:
        hint = f"{GOING_ON} goes on from the codes"
        message = f"the model is quantized here, and {grid} would round it again"
        yield Problem(where, message, hint, "key")
    for key in ("fake_quant_after_n_steps", "bit_schedule"):
        if asked.get(key):
            message = "the model is quantized here, and training begins with its codes"
            yield Problem((*where, key), message, f"leave {key} out", "key")
    new = _grid(asked)
    names = [key for key in before if key in new and before[key] != new[key]]
    if names:
        had, wants = (
            ", ".join(f"{key}: {g[key]}" for key in names) for g in (before, new)
        )
        message = f"the model is quantized here with {had}; this asks for {wants}"
        hint = "ask for the same: training goes on from the codes"
        yield Problem(where, message, hint, "key")


def _grid(block: Any, kind: type[QuantSpec] = QuantizationConfig) -> dict:
    """What a block asks of the quantized layers; empty if it is no right one."""
    block = block if isinstance(block, dict) else {}
    try:
        asked = {k: v for k, v in block.items() if k in kind.model_fields}
        return kind(**asked).model_dump()
    except ValidationError:
        return {}


def _formats(data: dict, stages: list, find: Find) -> Iterator[Problem]:
    """Formats that this model does not have, said before it is trained."""
    _, source = model_path(data)
    config = read_config(find(source) if source else None)
    adapted = False
    for where, kind, block in stages:
        if kind == "train":
            adapted = block.get("adapter") is not None
        named = block.get("formats") if kind == "export" else None
        for index, name in enumerate(named if isinstance(named, list) else []):
            at = (*where, "formats", index)
            if name == "peft" and not adapted:
                hint = "train with `adapter:`, or leave peft out"
                yield Problem(at, "no adapter is trained that could be exported", hint)
            require = getattr(FORMATS.get(str(name)), "check_supported", None)
            if require and "model_type" in config:
                try:
                    require(config)
                except UserError as error:
                    yield Problem(at, error.message, error.hint)


def _quantization(data: dict, find: Find) -> dict | None:
    """What the recipe's model says of its own grid; None of a model without."""
    _, source = model_path(data)
    found = find(source) if source else None
    if found and found.suffix == GGUF and found.is_file():
        from ..convert.importers.gguf import is_quantized

        return {} if is_quantized(found) else None
    config = read_config(found)
    if "quantization" in config:
        return _grid(config["quantization"], QuantSpec)
    return {} if "quantization_config" in config else None


def read_config(folder: Path | None) -> dict:
    """A checkpoint's config.json; empty when there is none that can be read."""
    try:
        config = json.loads((folder / "config.json").read_text()) if folder else {}
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
