"""`lmx recipes` and `lmx init`: the included recipes, to copy, or with your model, data
and bits as a new file."""

import argparse
import os
import re
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ..config.bundled import (
    SCHEMA_LINE,
    bundled_data,
    bundled_recipes,
    locate,
    schema_file,
    summaries,
    without_schema_line,
)
from ..config.errors import ConfigErrors, KeyPath
from ..config.evaluate import EvaluateConfig, ExactMatchConfig
from ..config.loader import find as find_from
from ..config.overrides import merge
from ..config.yaml_io import read, write_inline
from ..errors import UserError
from ..files.atomic import write_atomic
from ..run import terminal
from .execution import MODEL_FLAGS, take_model

if TYPE_CHECKING:
    from .own_data import OwnData

TASKS = {
    "finetune": "train a LoRA adapter and merge it",
    "qat": "fine-tune a model that is served with few bits",
    "quantize": "quantize a finished model, without training",
    "draft": "train a draft model that makes decoding faster",
}
BITS = (2, 3, 4, 5, 6, 8)
# Recipes by task; those of other bits are the recipe of 4 bits with other bits.
TEMPLATES = {"finetune": "lora", "draft": "distill_draft"}
BY_BITS = {
    "qat": {2: "qat_2bit", 3: "qat_3bit", 4: "qat_4bit"},
    "quantize": {2: "ptq_3bit", 3: "ptq_3bit", 4: "ptq_4bit"},
}
INCLUDED_MODEL = "data/tiny-base"
# The included recipes fit a model of 3.5 million parameters. Values for other models,
# by key: the comments of the recipes name them, too.
TOKENS, ADAPTER_RATE, FULL_RATE = 1024, 1e-4, 1e-5
# For other data: tokens that the included model has positions for, and passes of the
# first training and of those that go on from it.
POSITIONS, EPOCHS, MORE_EPOCHS = 512, 3, 1
FOR_OTHER_MODELS: dict[str, tuple[str, Any]] = {
    "batch_size": ("batch_tokens", 2048),
    "num_layers": ("num_layers", None),
    "max_tokens": ("max_tokens", 256),
}


def add_recipes_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `lmx recipes`."""
    parser.description = (
        "List the included recipes. `lmx recipes copy NAME` writes one as a file of "
        "your own."
    )
    actions = parser.add_subparsers(dest="action", metavar="copy")
    copy = actions.add_parser("copy", help="copy an included recipe")
    copy.add_argument("name", choices=bundled_recipes(), metavar="NAME")
    copy.add_argument(
        "target", nargs="?", metavar="TARGET", help="file or folder; default: NAME.yaml"
    )


def recipes(arguments: argparse.Namespace) -> int:
    """Print the list, or copy a recipe; the exit code is 0.

    Raises:
        UserError: the target exists.
    """
    if arguments.action is None:
        items = summaries()
        width = max(map(len, items))
        lines = [f"{name:<{width}}  {about}\n" for name, about in items.items()]
        terminal.write_out("".join(lines))
        return 0
    source = locate(arguments.name)
    target = Path(os.path.expanduser(arguments.target or source.name))
    if target.is_dir():
        target /= source.name
    write_recipe(target, source.read_text("utf-8"))
    terminal.write_out(
        f"{target}\nThe paths in data/ are those of lmx's own small model and data: "
        f"replace them with yours.\nThen: lmx-train {target} --dry-run\n"
    )
    return 0


def write_recipe(target: Path, text: str) -> None:
    """Write a recipe that names the installed schema.

    Raises:
        UserError: the target exists, or a disk error.
    """
    _require_new(target)
    schema = schema_file().resolve().as_uri()
    write_atomic(target, f"{SCHEMA_LINE}{schema}\n{without_schema_line(text)}")


def _require_new(target: Path) -> None:
    if target.exists() or target.is_symlink():
        message = "the file exists, and is not overwritten"
        hint = "give another name; for lmx init: --output FILE"
        raise UserError(message, place=str(target), hint=hint)


def add_init_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `lmx init`."""
    parser.description = "Write a recipe for your model and data."
    add = parser.add_argument
    add(*MODEL_FLAGS, help="local folder, Hub id or GGUF file; or the first word")
    add("--data", help="file, folder or Hub id; not necessary for quantize")
    add(
        "--columns",
        metavar="NAME=COLUMN,...",
        help="your columns, as in prompt=question,completion=answer; default: the "
        "usual names are recognized",
    )
    add(
        "--task",
        choices=TASKS,
        default="qat",
        help="; ".join(f"{k}: {v}" for k, v in TASKS.items()) + "; default: qat",
    )
    add("--bits", type=int, choices=BITS, help="of qat and quantize; default: 4")
    add("--output", type=Path, metavar="FILE", help="default: named after the task")
    add("overrides", nargs="*", metavar="key=value", help="set a value of the recipe")


def init(arguments: argparse.Namespace) -> int:
    """Write the recipe; the exit code is 0.

    Raises:
        UserError: the file exists, or a value is missing or does not work.
    """
    from ..models.checkpoint import model_folder
    from ..pipeline.plan import load, plan
    from .own_data import inspect, parse_columns

    task = arguments.task
    take_model(arguments)
    if arguments.model:
        arguments.model = model_folder(arguments.model)
    if arguments.bits and task not in BY_BITS:
        raise UserError(f"--bits does not apply to {task}", hint="qat or quantize")
    if not arguments.model or not (arguments.data or task == "quantize"):
        missing = "--data" if arguments.model else "--model"
        raise UserError(f"{missing} is missing", hint="see lmx init --help")
    from ..models.drafters.io import is_drafter

    if Path(arguments.model).expanduser().is_dir() and is_drafter(arguments.model):
        raise UserError(
            "this is a drafter, and no model",
            place=arguments.model,
            hint="give the model that it drafts for",
        )
    quantization = _quantization(task, arguments.model, arguments.bits)
    name = f"{task}_{quantization['bits']}bit" if quantization else task
    target = arguments.output or Path(f"{name}.yaml")
    _require_new(target)
    columns, own = parse_columns(arguments.columns), None
    if arguments.data:
        own = inspect(arguments.data, columns, partial(find_from, root=Path.cwd()))
        columns = own.columns if own else columns
    text = recipe_text(task, arguments.model, arguments.data, quantization, own)
    if columns:
        text = add_value(text, ("data",), "columns", columns)
    for override in arguments.overrides:
        text = with_override(text, override)
    try:
        plan(load(target, text=text))
    except ConfigErrors as errors:
        # There is no file whose lines could be named.
        found = [replace(error, place=None) for error in errors.errors]
        raise ConfigErrors(None, "", found) from None
    write_recipe(target, text)
    lines = [str(target)]
    if own and own.is_guessed:
        pairs = ", ".join(f"{name}: {column}" for name, column in columns.items())
        lines.append(f"Columns of the data, guessed from names and order: {pairs}")
    if "thresholds:" in text:
        lines.append("A model that misses a threshold is not published: adapt them.")
    lines.append(f"Then: lmx-train {shlex.quote(str(target))} --dry-run")
    terminal.write_out("\n".join(lines) + "\n")
    return 0


def recipe_text(
    task: str,
    model: str,
    data: str | None,
    quantization: dict[str, Any] | None,
    own: "OwnData | None" = None,
) -> str:
    """The recipe of a task, with its comments.

    Args:
        data: training data; None = none, for the task quantize.
        quantization: `bits`, or the whole grid of a model from whose codes qat goes on;
            None for a task without quantization.
        own: what the data is like; None = it is not on this disk.
    """
    by_bits, grid = BY_BITS.get(task, {}), quantization or {}
    bits, has_codes = grid.get("bits"), "group_size" in grid
    name = by_bits.get(4 if has_codes else bits, by_bits.get(4)) or TEMPLATES[task]
    text = without_schema_line(bundled_recipes()[name].read_text("utf-8"))
    if bits:
        text = _with_bits(text, bits)
    if has_codes:
        text = set_value(text, ("stages", 0, "train", "qat"), grid)
    text = set_value(text, ("model",), model)
    is_own = data != read(text).data["data"].get("train")
    text = _with_data(text, task, data)
    if not _is_included(model):
        text = _for_other_model(text, task)
    return _for_other_data(text, task, own) if data and is_own else text


def _is_included(model: str) -> bool:
    """Whether it is the included model, whatever its path is written like."""
    path, included = Path(model).expanduser(), bundled_data(Path(INCLUDED_MODEL))
    is_same = included and path.exists() and path.samefile(included)
    return path == Path(INCLUDED_MODEL) or bool(is_same)


def _quantization(task: str, model: str, bits: int | None) -> dict[str, Any] | None:
    """The argument of `recipe_text`.

    Raises:
        UserError: the recipe would quantize a quantized model again, or the model
            cannot be imported.
    """
    from ..convert.importers import resolve_checkpoint
    from ..pipeline.plan import initial_state

    if task not in BY_BITS:
        return None
    find = partial(find_from, root=Path.cwd())
    state = initial_state({"model": model}, find)
    if state.quantization == {}:
        # MLX's grid for another tool's codes is that of the import.
        folder = str(resolve_checkpoint(find(model)))
        state = initial_state({"model": folder}, find)
    if state.quantization is None:
        return {"bits": bits or 4}
    keys = ("bits", "group_size", "mode", "global_scale", "quantize_activations")
    values = [(key, (state.config | state.quantization).get(key)) for key in keys]
    grid = {key: value for key, value in values if value not in (None, False, "affine")}
    if task == "qat" and "bits" in grid and bits in (None, grid["bits"]):
        return grid
    raise UserError(
        f"the model is quantized to {grid.get('bits')} bits already, and quantizing "
        "again adds error",
        place=model,
        hint="leave --bits out: --task qat continues from the codes; or start from the "
        f"model before it was quantized, or expand it: lmx convert {model} TARGET "
        "--dequantize",
    )


def _with_bits(text: str, bits: int) -> str:
    """The text with other bits in its title and in its stages."""
    title, newline, rest = text.partition("\n")
    text = re.sub(r"\b\d(?=-bit| bits)", str(bits), title) + newline + rest
    for path, value in _values(read(text).data):
        if path[-1] == "bits" and value != bits:
            text = set_value(text, path, bits)
    return text


def _with_data(text: str, task: str, data: str | None) -> str:
    if task == "quantize":
        if data is None:
            return set_value(text, ("data", "valid"), "builtin:stdlib")
        # The validation data is a part of the training data.
        text = set_value(text, ("data", "valid"), data, key="train")
        path = ("stages", 0, "quantize", "calibration")
        return set_value(text, path, {"max_seq_length": 256})
    if data == read(text).data["data"]["train"]:
        return text
    text = set_value(text, ("data", "train"), data)
    text = without_key(text, ("data", "valid"))
    for path, _ in _values(read(text).data):
        if path[-1] == "sample_prompts":
            text = without_key(text, path)
    return text


def _for_other_data(text: str, task: str, own: "OwnData | None") -> str:
    """The text with epochs, batches and an evaluation that fit the data."""
    trained = 0
    for path, value in [*_values(read(text).data)]:
        key, is_training = path[-1], path[2:3] == ("train",)
        if key == "steps" and is_training and len(path) == 4:
            epochs, trained = MORE_EPOCHS if trained else EPOCHS, trained + 1
            text = set_value(text, path, epochs, key="epochs")
        elif is_training and own and key in own.small_batch:
            text = set_value(text, path, min(value, own.small_batch[key]))
        elif key == "max_seq_length" and path[0] == "data" and task != "quantize":
            text = set_value(text, path, max(value, POSITIONS))
    for number, stage in enumerate(read(text).data["stages"]):
        if "evaluate" in stage and own and own.answer_tokens:
            path = ("stages", number, "evaluate")
            if own.answer_tokens > EvaluateConfig().max_tokens:
                text = add_value(text, path, "max_tokens", own.answer_tokens)
            samples = ExactMatchConfig().samples
            text = add_value(text, path, "exact_match", {"samples": samples})
    return text


def _for_other_model(text: str, task: str) -> str:
    """The text with values for a model that is not tiny."""
    # A recipe that trains the tiny model in full may have an adapter as a comment.
    text = text.replace("# adapter: {", "adapter: {")
    stages = read(text).data["stages"]
    for path, _ in [*_values(read(text).data)]:
        key = path[-1]
        if key == "max_seq_length" and task != "quantize":
            text = set_value(text, path, TOKENS)
        elif key == "learning_rate" and path[2] == "train":
            has_adapter = "adapter" in stages[path[1]]["train"]
            rate = ADAPTER_RATE if has_adapter else FULL_RATE
            text = set_value(text, path, rate)
        elif key in FOR_OTHER_MODELS:
            renamed, value = FOR_OTHER_MODELS[key]
            text = set_value(text, path, value, key=renamed)
    return text


def _values(data: Any, path: KeyPath = ()) -> list[tuple[KeyPath, Any]]:
    """All values of plain data that are no blocks, with their paths."""
    if isinstance(data, dict):
        items = data.items()
    elif isinstance(data, list) and any(isinstance(item, dict) for item in data):
        items = enumerate(data)
    else:
        return [(path, data)]
    return [pair for key, value in items for pair in _values(value, (*path, key))]


def set_value(text: str, path: KeyPath, value: Any, key: str | None = None) -> str:
    """The text with another value at a path that has a scalar or a list in brackets.

    Args:
        key: the new name of the key; None = the same.
    """
    name, node = _entry(text, path)
    assert isinstance(node, yaml.ScalarNode) or node.flow_style
    # A value that is absent ends at its colon.
    is_absent = node.start_mark.index == node.end_mark.index
    text = _replaced(text, node, " " * is_absent + write_inline(value))
    return _replaced(text, name, key) if key else text


def add_value(text: str, path: KeyPath, key: str, value: Any) -> str:
    """The text with a new key at the start of the block at a path."""
    node = _entry(text, path)[1]
    if isinstance(node, yaml.ScalarNode) or node.flow_style:
        block = read(text[node.start_mark.index : node.end_mark.index]).data or {}
        return set_value(text, path, {key: value, **block})
    line = f"{key}: {write_inline(value)}\n{' ' * node.start_mark.column}"
    start = node.start_mark.index
    return text[:start] + line + text[start:]


def with_override(text: str, override: str) -> str:
    """The text with a value that is given as on the command line of a run.

    Raises:
        ConfigErrors: it does not fit the recipe.
        UserError: the value is a block of several lines.
    """
    data = read(text).data
    origins, errors = merge(data, [override])
    if errors:
        raise ConfigErrors(None, "", errors)
    # The value, or the outermost block that it needs.
    path: KeyPath = min(origins, key=len)
    value: Any = data
    for step in path:
        value = value[step]
    try:
        node = _entry(text, path)[1]
    except StopIteration:
        return add_value(text, path[:-1], str(path[-1]), value)
    if not isinstance(node, yaml.ScalarNode) and not node.flow_style:
        hint = "give its keys one by one"
        raise UserError(f"{override}: this block has several lines", hint=hint)
    return set_value(text, path, value)


def without_key(text: str, path: KeyPath) -> str:
    """The text without the line of a key whose value is on the same line."""
    name, node = _entry(text, path)
    assert name.start_mark.line == node.end_mark.line
    lines = text.splitlines(keepends=True)
    del lines[name.start_mark.line]
    return "".join(lines)


def _entry(text: str, path: KeyPath) -> tuple[yaml.Node, yaml.Node]:
    """The key and the value at a path; for an entry of a list, the value twice."""
    key = node = yaml.compose(text, Loader=yaml.SafeLoader)
    for step in path:
        if isinstance(step, int):
            key = node = node.value[step]
        else:
            key, node = next(pair for pair in node.value if pair[0].value == step)
    return key, node


def _replaced(text: str, node: yaml.Node, new: str) -> str:
    return text[: node.start_mark.index] + new + text[node.end_mark.index :]
