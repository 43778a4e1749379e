"""`lmx-train` and `lmx quantize`: run a recipe, or one that options stand for."""

import argparse
import os
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..config.redaction import redact
from ..errors import UserError
from ..run import terminal

FLAGS = {
    "--dry-run": "check recipe, data, memory and disk, and show the plan",
    "--restart": "move an earlier run of this recipe aside and start over",
    "--ignore-limits": "run even if the estimate exceeds memory or disk",
    "--quiet": "print only warnings and the result",
}
# Also of commands that run recipes which may name Python files.
ALLOW_PYTHON = {
    "--allow-python": "run the Python files that the recipe names as rewards"
}
# They are part of the command that resumes a run.
KEPT_FLAGS = ("--ignore-limits", *ALLOW_PYTHON)
# Of training without --batch-size, --steps, --epochs and --budget: of the last key.
DEFAULTS = {("steps", "budget", "epochs"): 1, ("batch_size", "batch_tokens"): 2048}
# Addresses of the method of `lmx quantize`.
METHOD = ("stages.quantize.method", "stages.1.quantize.method")
MODEL_FLAGS = ["-m", "--model"]
# Options whose value is text, not YAML.
TEXTS = ("--model", "--data", "--valid")
# By kind of stage; by flag, the address of the value in the recipe and its meaning.
OPTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "train": {
        "--model": ("model", "folder, Hub id or GGUF file"),
        "--data": ("data.train", "training data: file, folder or Hub id"),
        "--valid": ("data.valid", "validation data"),
        "--lora-rank": (
            "stages.train.adapter.rank",
            "train a LoRA adapter of this rank and merge it",
        ),
        "--bits": ("stages.train.qat.bits", "QAT: bits of the new model"),
        "--steps": ("stages.train.steps", "optimizer steps"),
        "--epochs": ("stages.train.epochs", "passes over the data"),
        "--budget": ("stages.train.budget", "time such as 3h, or tokens"),
        "--batch-size": ("stages.train.batch_size", "examples per batch"),
        "--batch-tokens": ("stages.train.batch_tokens", "tokens per batch"),
        "--learning-rate": ("stages.train.learning_rate", "peak learning rate"),
        "--max-seq-length": ("data.max_seq_length", "tokens per sequence"),
        "--seed": ("seed", "random seed"),
    },
    "quantize": {
        "--model": ("model", "folder, Hub id or GGUF file"),
        "--data": (
            "data.train",
            "calibration data: file, folder or Hub id; default: built-in text",
        ),
        "--method": (
            "stages.quantize.method",
            "rtn, gptq or awq; default: gptq with the effort fast",
        ),
        "--bits": ("stages.quantize.bits", "bits per weight"),
        "--group-size": ("stages.quantize.group_size", "weights per scale"),
        "--seed": ("seed", "random seed"),
    },
}


def add_execution_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare overrides and how to run."""
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="set a value of the recipe"
    )
    parser.add_argument("--output", metavar="FOLDER", help="run directory")
    for flag, meaning in FLAGS.items():
        parser.add_argument(flag, action="store_true", help=meaning)


def add_recipe_options(parser: argparse.ArgumentParser, kind: str) -> None:
    """Declare the options of a kind of stage."""
    group = parser.add_argument_group("options instead of a recipe")
    for flag, (_, about) in OPTIONS[kind].items():
        group.add_argument(*(MODEL_FLAGS if flag == "--model" else [flag]), help=about)


def take_model(arguments: argparse.Namespace) -> None:
    """A first word that sets no value is the model, as of other verbs."""
    words = arguments.overrides
    if words and "=" not in words[0] and not arguments.model:
        arguments.model = words.pop(0)


def given_options(arguments: argparse.Namespace, kind: str) -> dict[str, str]:
    """The values of the options that stand for a recipe, as far as they are given."""
    values = vars(arguments)
    given = {flag: values[flag[2:].replace("-", "_")] for flag in OPTIONS[kind]}
    return {flag: value for flag, value in given.items() if value is not None}


def recipe_of(arguments: argparse.Namespace, kind: str) -> dict[str, Any]:
    """The recipe that the options stand for, as plain data.

    Without `data.columns` it has the usual names of columns that the data has.

    Raises:
        UserError: --model or --data is missing, or the data cannot be read.
    """
    # Loads PyYAML, which `--help` does not need.
    from ..config.loader import find
    from ..config.overrides import merge
    from ..config.yaml_io import read

    overrides = arguments.overrides
    needed = ["--model"] + ["--data"] * (kind == "train")
    given = given_options(arguments, kind)
    if missing := [flag for flag in needed if flag not in given]:
        raise UserError(
            f"{missing[0]} is missing", hint=f"see lmx {kind} --help; or give a recipe"
        )
    stage: dict[str, Any] = {}
    stages = [{kind: stage}, {"evaluate": {}}, {"export": {}}]
    data = {"model": None, "data": {}, "seed": 0, "stages": stages}
    values: list[tuple[str, Any]] = []
    for flag, text in given.items():
        value: Any = text
        if flag not in TEXTS:
            document = read(text)
            if document.errors:
                raise UserError(f"{flag}: {document.errors[0].message}")
            value = document.data
        values.append((OPTIONS[kind][flag][0], value))
    merge(data, values)
    if "--data" in given and not any(o.startswith("data.columns") for o in overrides):
        from .own_data import inspect

        own = inspect(given["--data"], {}, partial(find, root=Path.cwd()))
        if own and own.columns:
            data["data"]["columns"] = own.columns
    for keys, value in DEFAULTS.items() if kind == "train" else ():
        if not stage.keys() & {*keys}:
            stage[keys[-1]] = value
    if kind == "quantize":
        from ..api.jobs import quantize_stages

        for override in overrides:
            key, _, value = override.partition("=")
            if key in METHOD:
                # It does not get the keys of the default method.
                stage["method"] = value
        data["stages"] = quantize_stages(stage, data["data"])
    return data


def add_quantize_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `lmx quantize`."""
    parser.description = (
        "Quantize a model after training, and export it. The options stand for a "
        "recipe, which is printed and kept in the run directory. The same command "
        "finds its run again."
    )
    add_recipe_options(parser, "quantize")
    add_execution_arguments(parser)


def quantize(arguments: argparse.Namespace) -> int:
    """Quantize a model; returns the exit code."""
    take_model(arguments)
    return execute(arguments, "quantize")


def execute(arguments: argparse.Namespace, kind: str, source: str | None = None) -> int:
    """Run or check a recipe; returns the exit code.

    SIGTERM interrupts as SIGINT does, from the first check to the last line.

    Args:
        kind: of the stage that the options describe.
        source: a recipe; None = that of the options.
    """
    from ..run.signals import sigterm_interrupts

    with sigterm_interrupts():
        return _execute(arguments, kind, source)


def _execute(arguments: argparse.Namespace, kind: str, source: str | None) -> int:
    from ..api.recipe import Recipe
    from ..launcher import launched_rank

    if arguments.dry_run and launched_rank():
        # Only the first of several processes prints.
        return 0
    overrides = list(arguments.overrides)
    if arguments.output is not None:
        overrides.append(("output", os.path.expanduser(arguments.output)))
    recipe = Recipe(source or recipe_of(arguments, kind), overrides=overrides)
    if source is None and not launched_rank():
        terminal.write_out(redact(recipe.to_yaml()))
    if arguments.dry_run:
        from ..pipeline.dry_run import dry_run

        return dry_run(
            recipe.loaded,
            replace(recipe.plan, restart=arguments.restart),
            ignore_limits=arguments.ignore_limits,
        )
    from ..pipeline.extensions import Extensions
    from ..pipeline.runner import run

    # The command that resumes the run.
    words = [str(recipe.output / "recipe.yaml"), f"output={recipe.output}"]
    if source:
        words = [source, *recipe.loaded.overrides]
    run(
        recipe.loaded,
        recipe.plan,
        restart=arguments.restart,
        ignore_limits=arguments.ignore_limits,
        quiet=arguments.quiet,
        command=shlex.join(["lmx-train", *words, *kept_flags(arguments)]),
        extensions=Extensions(allow_python="--allow-python" in kept_flags(arguments)),
    )
    return 0


def kept_flags(arguments: argparse.Namespace) -> list[str]:
    """The given flags that the same run needs again."""
    given = vars(arguments)
    return [flag for flag in KEPT_FLAGS if given.get(flag[2:].replace("-", "_"))]
