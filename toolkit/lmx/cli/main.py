"""Entry points of `lmx-train` and `lmx`. A verb imports only what it needs."""

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from ..config.redaction import redact
from ..errors import FAILED, INTERRUPTED, USAGE, Interrupted, UserError, shorten
from ..files.atomic import os_error
from ..run import terminal
from ..version import __version__
from .execution import (
    ALLOW_PYTHON,
    MODEL_FLAGS,
    add_execution_arguments,
    add_recipe_options,
    execute,
    given_options,
    take_model,
)

EXAMPLES = """\
examples:
  lmx-train qat_4bit                        a bundled recipe
  lmx-train my.yaml --dry-run               all checks that need no training
  lmx-train my.yaml seed=1 stages.train.learning_rate=1e-4 output=exports/try
  lmx-train --model MODEL --data my.jsonl --lora-rank 16 --bits 4 --steps 100
The same command resumes an interrupted run and skips completed stages.
exit codes: 0 done, 1 the run failed or missed a threshold, 2 recipe or usage,
3 does not fit in memory or on disk, 130 interrupted and resumable"""
VERBS = {
    "train": "run a recipe, or train with options (same as lmx-train)",
    "quantize": "quantize a model without a recipe file",
    "sweep": "run a recipe with several values and seeds, and compare",
    "init": "write a recipe for your model and data",
    "recipes": "list the included recipes, or copy one",
    "schema": "show the recipe schema: keys, types, defaults",
    "generate": "generate text with a model",
    "serve": "serve a model over HTTP, as OpenAI's API",
    "bench": "measure latency and throughput of a model",
    "convert": "convert a GPTQ, AWQ, GGUF or peft checkpoint to MLX, or dequantize",
    "report": "write report.html of a run again",
    "compare": "compare runs",
    "push": "upload a model to the Hugging Face Hub",
    "doctor": "show hardware, versions and measured speed",
}
# Verbs whose first word is a model, which --model may name, too.
MODEL_VERBS = ("generate", "serve", "bench", "convert", "push")
# Set by the completion scripts of argcomplete.
COMPLETION = "_ARGCOMPLETE"
# Modules of the verbs, where the name is another.
MODULES = dict.fromkeys(["report", "compare", "push"], "runs") | {
    "quantize": "execution",
    "init": "recipes",
}


class HintingParser(argparse.ArgumentParser):
    """A parser without abbreviations, whose errors hint at the right option."""

    def __init__(self, *args, **options):
        super().__init__(*args, allow_abbrev=False, **options)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace=None):
        """Parse, and keep the words for the hints of an error."""
        self._words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def _print_message(self, message: str, file=None) -> None:
        # argparse prints the help and the version here; `error` prints by itself.
        terminal.write_out(message)

    def error(self, message: str) -> NoReturn:
        """Print the usage, the message and a hint per known name; exit with 2."""
        from ..config.key_hints import tables
        from ..config.messages import nearest

        words = [word.partition("=")[0].replace("_", "-") for word in self._words]
        known = self._option_string_actions
        hints = [
            f"\n    hint: {word} is called {name} here"
            for word in dict.fromkeys(words)
            if word not in known
            for name in tables()["options"].get(word, [])
            # An option of another verb is no hint.
            if not name.startswith("--") or name in known
        ]
        advice = tables()["advice"]
        given = [w for w in dict.fromkeys(words) if w in advice and w not in known]
        hints += [f"\n    hint: {word}: {advice[word]}" for word in given]
        verb = next(iter(self._words), "")
        if self.prog == "lmx" and verb and verb not in VERBS:
            message = f"there is no verb {verb!r}"
            hints = hints or [f"\n    hint: {nearest(verb, VERBS)}"]
        names = [
            f"[{name}]" if action.nargs in ("?", "*") else name
            for action in self._get_positional_actions()
            for name in [action.metavar or action.dest]
        ]
        usage = " ".join(["usage:", self.prog, *names, "[options]"])
        error = f"{self.prog}: error: {shorten(message)}{''.join(hints)}\n"
        terminal.write_err(f"{usage}; {self.prog} --help lists them\n{error}")
        raise SystemExit(USAGE)


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
        complete(parser)
    arguments = parser.parse_intermixed_args(argv)
    options = [*given_options(arguments, "train")]
    if options and arguments.recipe and not _is_recipe(arguments.recipe):
        arguments.overrides.insert(0, arguments.recipe)
        arguments.recipe = None
        take_model(arguments)
    if not (arguments.recipe or arguments.list or options):
        parser.error("give a recipe, options such as --model, or --list")
    if arguments.list:
        from ..launcher import launched_rank
        from .schema import listing

        if not launched_rank():
            terminal.write_out(listing() + "\n")
        return 0
    if not options:
        return execute(arguments, "train", arguments.recipe)
    if arguments.recipe:
        raise UserError(
            f"a recipe and {options[0]}: give one of them",
            place=arguments.recipe,
            hint="override values of a recipe with key=value, such as "
            "stages.train.learning_rate=1e-4",
        )
    return execute(arguments, "train")


def _is_recipe(name: str) -> bool:
    from ..config.bundled import bundled_recipes

    return name.endswith((".yaml", ".yml")) or name in bundled_recipes()


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
        complete(parser)
    verb = parser.parse_args(argv[:1]).verb
    if verb == "train":
        return _train(argv[1:])
    words, parser = argv[1:], verb_parser(verb)
    if verb in MODEL_VERBS:
        words = _model_first(words)
    # A model may stand before the options, and key=value after them.
    is_mixed = verb in ("quantize", "init")
    parse = parser.parse_intermixed_args if is_mixed else parser.parse_args
    arguments = parse(words)
    return arguments.command(arguments)


def _model_first(words: list[str]) -> list[str]:
    """The words with the value of --model as the first one."""
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in MODEL_FLAGS:
            rest = words[index + 1 :]
            values = [value] if equals else rest[:1]
            return [*values, *words[:index], *rest[not equals :]]
    return words


def _add_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", action="version", version=f"lmx {__version__}")


def verb_parser(verb: str) -> HintingParser:
    """The arguments of `lmx VERB`."""
    if verb == "train":
        return train_parser()
    parser = HintingParser(prog=f"lmx {verb}")
    module = import_module(f".{MODULES.get(verb, verb)}", __package__)
    getattr(module, f"add_{verb}_arguments")(parser)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.set_defaults(command=getattr(module, verb))
    return parser


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell's request for completions (argcomplete), and exit.

    Recipes, files and the keys of overrides are completed beside verbs and options.
    """
    import argcomplete
    from argcomplete.completers import FilesCompleter
    from argcomplete.lexers import split_line

    from ..config.bundled import bundled_recipes
    from ..config.json_schema import PATTERN, sections

    line, point = os.environ["COMP_LINE"], int(os.environ["COMP_POINT"])
    words = split_line(line, point)[3]
    if parser.prog == "lmx" and len(words) > 1 and words[1] in VERBS:
        # The number of the word that is the program.
        os.environ["_ARGCOMPLETE"] = "2"
        parser = verb_parser(words[1])
    files = FilesCompleter(("yaml", "yml"))
    completers = {
        "recipe": lambda prefix, **_: [*bundled_recipes(), *files(prefix)],
        "overrides": lambda **_: {
            f"{address}.{key}=".lstrip(".")
            for address, blocks in sections().items()
            for block in blocks
            for key in block["properties"]
            if PATTERN not in address
        },
    }
    for action in parser._actions:
        if completer := completers.get(action.dest):
            action.completer = completer
    argcomplete.autocomplete(parser, always_complete_options="long")


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
    except OSError as error:
        text = traceback.format_exc() if "--debug" in argv else f"{os_error(error)}\n"
        terminal.write_err(redact(text, keys=False))
        return FAILED
    except (KeyboardInterrupt, Interrupted) as stop:
        if str(stop):
            terminal.write_err(f"{stop}\n")
        return INTERRUPTED
    except Exception as error:
        # pydantic makes it of a Ctrl-C that comes while it builds a validator.
        if type(error).__name__ == "SchemaError":
            return INTERRUPTED
        raise
