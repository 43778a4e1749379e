"""Entry points of `lmx-train` and `lmx`. A verb imports only what it needs."""

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module

from ..config.redaction import redact
from ..errors import INTERRUPTED, Interrupted, UserError
from ..run import terminal
from ..version import __version__
from .execution import (
    ALLOW_PYTHON,
    add_execution_arguments,
    add_find_argument,
    execute,
)
from .options import add_recipe_options, given_options
from .parser import HintingParser

EXAMPLES = """\
examples:
  lmx-train qat_4bit                        a bundled recipe
  lmx-train my.yaml --dry-run               all checks that need no training
  lmx-train my.yaml seed=1 stages.train.steps=50 output=exports/try
  lmx-train --model MODEL --data my.jsonl --lora-rank 16 --bits 4 --steps 100
The same command resumes an interrupted run and skips completed stages.
exit codes: 0 done, 1 the run failed or missed a threshold, 2 recipe or usage,
3 does not fit in memory or on disk, 130 interrupted and resumable"""
VERBS = {
    "train": "run a recipe, or train with options (same as lmx-train)",
    "quantize": "quantize a model without a recipe file",
    "draft": "train a draft model without a recipe file",
    "sweep": "run a recipe with several values and seeds, and compare",
    "init": "write a recipe for your model and data",
    "recipes": "list the included recipes, or copy one",
    "schema": "show the recipe schema: keys, types, defaults",
    "generate": "generate text with a model",
    "bench": "measure latency and throughput of a model",
    "convert": "convert a GPTQ, AWQ, GGUF or peft checkpoint to MLX, or dequantize",
    "report": "write report.html of a run again",
    "compare": "compare runs",
    "push": "upload a model to the Hugging Face Hub",
    "doctor": "show hardware, versions and measured speed",
    "completion": "print the script for completion in bash, zsh or fish",
}
# Set by the completion scripts of argcomplete.
COMPLETION = "_ARGCOMPLETE"
# Modules of the verbs, where the name is another.
MODULES = {
    "report": "runs",
    "compare": "runs",
    "push": "runs",
    "quantize": "execution",
    "draft": "execution",
}


def train(argv: Sequence[str] | None = None) -> int:
    """`lmx-train RECIPE [key=value ...]`: run a recipe; returns the exit code."""
    return _guarded(_train, sys.argv[1:] if argv is None else list(argv))


def main(argv: Sequence[str] | None = None) -> int:
    """`lmx VERB ...`: returns the exit code."""
    return _guarded(_main, sys.argv[1:] if argv is None else list(argv))


def train_parser() -> HintingParser:
    """The arguments of `lmx-train`."""
    parser = HintingParser(
        prog="lmx-train",
        description="Run a recipe: train, quantize, draft, evaluate, export.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", nargs="?", help="a YAML file or a bundled recipe")
    add_execution_arguments(parser)
    add_find_argument(parser)
    for flag, meaning in {
        **ALLOW_PYTHON,
        "--list": "list bundled recipes, stages, methods and formats",
        "--debug": "show the traceback of an error",
    }.items():
        parser.add_argument(flag, action="store_true", help=meaning)
    add_recipe_options(parser, "train")
    _add_version(parser)
    return parser


def _train(argv: list[str]) -> int:
    parser = train_parser()
    if COMPLETION in os.environ:
        from .completion import complete

        complete(parser)
    arguments = parser.parse_intermixed_args(argv)
    options = [*given_options(arguments, "train")]
    if not (arguments.recipe or arguments.list or options):
        parser.error("give a recipe, options such as --model, or --list")
    return _run_recipe(arguments, options)


def _main(argv: list[str]) -> int:
    parser = HintingParser(
        prog="lmx",
        description="Train, quantize, evaluate and run language models on MLX.",
        epilog="\n".join(
            ["verbs:", *(f"  {verb:<22}{about}" for verb, about in VERBS.items())]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "verb", choices=VERBS, metavar="VERB", help="see below; each has its own --help"
    )
    _add_version(parser)
    if COMPLETION in os.environ:
        from .completion import complete_verb

        complete_verb(parser, {v: partial(verb_parser, v) for v in VERBS})
    verb = parser.parse_args(argv[:1]).verb
    return _train(argv[1:]) if verb == "train" else _run_verb(verb, argv[1:])


def _add_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", action="version", version=f"lmx {__version__}")


def verb_parser(verb: str) -> HintingParser:
    """The arguments of `lmx VERB`."""
    if verb == "train":
        return train_parser()
    parser = HintingParser(prog=f"lmx {verb}")
    parser.set_defaults(command=add_arguments(verb, parser))
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def add_arguments(verb: str, parser: argparse.ArgumentParser) -> Callable[..., int]:
    """Declare the arguments of a verb; returns the function that runs it."""
    module = import_module(f".{MODULES.get(verb, verb)}", __package__)
    getattr(module, f"add_{verb}_arguments")(parser)
    return getattr(module, verb)


def _run_verb(verb: str, argv: list[str]) -> int:
    arguments = verb_parser(verb).parse_args(argv)
    return arguments.command(arguments)


def _run_recipe(arguments: argparse.Namespace, options: list[str]) -> int:
    if arguments.list:
        from ..run.launcher import launched_rank
        from .schema import listing

        if not launched_rank():
            terminal.write_out(listing() + "\n")
        return 0
    if not options:
        return execute(arguments, "train", arguments.recipe)
    if arguments.recipe and "=" not in arguments.recipe:
        raise UserError(
            f"a recipe and {options[0]}: give one of them",
            place=arguments.recipe,
            hint="override values of a recipe with key=value, such as "
            "stages.train.steps=50",
        )
    if arguments.recipe:
        arguments.overrides.insert(0, arguments.recipe)
    return execute(arguments, "train")


def _guarded(command: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run a command. A `UserError` becomes a message and an exit code."""
    terminal.reserve_streams()
    sys.excepthook = terminal.write_crash
    warnings.showwarning = lambda message, *_: terminal.write_err(
        redact(f"warning: {message}\n")
    )
    try:
        return command(argv)
    except terminal.ReaderGone:
        return 0
    except UserError as error:
        if "--debug" in argv:
            terminal.write_err(redact(traceback.format_exc(), keys=False))
        elif str(error):
            terminal.write_err(redact(f"{error}\n", keys=False))
        return error.code
    except (KeyboardInterrupt, Interrupted) as stop:
        if str(stop):
            terminal.write_err(f"{stop}\n")
        return INTERRUPTED
    except Exception as error:
        # pydantic makes it of a Ctrl-C that comes while it builds a validator.
        if type(error).__name__ == "SchemaError":
            return INTERRUPTED
        raise
