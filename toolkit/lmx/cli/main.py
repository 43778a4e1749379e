"""The command line: lmx-train, and lmx with its verbs. Imports what a verb needs."""

import argparse
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence

from ..errors import INTERRUPTED, Interrupted, UserError

EXAMPLES = """\
examples:
  lmx-train qat_4bit                        a shipped recipe
  lmx-train my.yaml --dry-run               everything that can be known beforehand
  lmx-train my.yaml seed=1 stages.train.steps=50 output=exports/try
The same command again resumes or skips what is done.
exit codes: 0 done, 1 the run or a gate failed, 2 recipe or usage,
3 will not fit in memory or on disk, 130 interrupted and resumable"""


def train(argv: Sequence[str] | None = None) -> int:
    """`lmx-train RECIPE [key=value ...]`: run a recipe; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="lmx-train",
        description="Run a recipe: train, quantize, validate, export.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("recipe", nargs="?", help="a YAML file, or a shipped recipe")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="set a value of the recipe"
    )
    for flag, meaning in {
        "--dry-run": "read recipe, data and disk, show the plan; run nothing",
        "--restart": "start over: set an earlier run of this recipe aside",
        "--ignore-limits": "run although memory or disk look too small",
        "--list": "show shipped recipes, stages, methods and formats",
        "--quiet": "print warnings and the result only",
        "--debug": "show the traceback of an error",
    }.items():
        parser.add_argument(flag, action="store_true", help=meaning)
    arguments = parser.parse_intermixed_args(argv)
    if not arguments.recipe and not arguments.list:
        parser.error("name a recipe, or see --list")
    return _guarded(lambda: _train(arguments), debug=arguments.debug)


def main(argv: Sequence[str] | None = None) -> int:
    """`lmx VERB ...`: returns the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    verbs: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
        "train": ("run a recipe (the same as lmx-train)", train),
        "schema": ("the recipe schema: keys, types, defaults", _schema),
        "generate": ("continue a prompt with a model", _generate),
        "bench": ("how fast a model generates, and what would speed it up", _bench),
        "convert": ("convert a GPTQ, AWQ, GGUF or peft checkpoint to MLX", _convert),
        "report": ("make the page of a run again", _report),
        "compare": ("runs side by side", _compare),
        "push": ("publish a model on the Hugging Face Hub", _push),
        "doctor": ("what this machine computes with, and how fast", _doctor),
    }
    parser = argparse.ArgumentParser(
        prog="lmx",
        description="Train, quantize, prove and run language models on MLX.",
        epilog="\n".join(
            ["verbs:", *(f"  {verb:<22}{about}" for verb, (about, _) in verbs.items())]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "verb", choices=verbs, metavar="VERB", help="see below; each has its own --help"
    )
    verb = parser.parse_args(argv[:1]).verb
    return verbs[verb][1](argv[1:])


def _train(arguments: argparse.Namespace) -> int:
    from ..config import bundled
    from ..run.launcher import launched_rank

    if launched_rank() and (arguments.list or arguments.dry_run):
        # The first of several processes tells it.
        return 0
    if arguments.list:
        from .listing import listing

        sys.stdout.write(listing() + "\n")
        return 0
    path = bundled.locate(arguments.recipe)
    from ..config.loader import load_recipe
    from ..pipeline.plan import plan

    loaded = load_recipe(path, arguments.overrides)
    steps = plan(loaded)
    if arguments.dry_run:
        from ..pipeline.dry_run import dry_run

        return dry_run(loaded, steps, ignore_limits=arguments.ignore_limits)
    from ..pipeline.runner import run

    return run(
        loaded,
        steps,
        restart=arguments.restart,
        ignore_limits=arguments.ignore_limits,
        quiet=arguments.quiet,
        command=shlex.join(
            ["lmx-train", arguments.recipe, *arguments.overrides]
            + ["--ignore-limits"] * arguments.ignore_limits,
        ),
    )


def _schema(argv: Sequence[str]) -> int:
    from . import schema

    return _verb("schema", schema, argv)


def _generate(argv: Sequence[str]) -> int:
    from . import generate

    return _verb("generate", generate, argv)


def _bench(argv: Sequence[str]) -> int:
    from . import bench

    return _verb("bench", bench, argv)


def _convert(argv: Sequence[str]) -> int:
    from . import convert

    return _verb("convert", convert, argv)


def _report(argv: Sequence[str]) -> int:
    from . import report

    return _verb("report", report, argv)


def _compare(argv: Sequence[str]) -> int:
    from . import compare

    return _verb("compare", compare, argv)


def _push(argv: Sequence[str]) -> int:
    from . import push

    return _verb("push", push, argv)


def _verb(name: str, command, argv: Sequence[str]) -> int:
    """Run a verb whose module declares its arguments."""
    parser = argparse.ArgumentParser(prog=f"lmx {name}", allow_abbrev=False)
    command.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    arguments = parser.parse_args(argv)
    return _guarded(lambda: command.run(arguments), debug=arguments.debug)


def _doctor(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="lmx doctor", allow_abbrev=False)
    parser.parse_args(argv)
    from . import doctor

    return _guarded(doctor.run, debug=False)


def _guarded(command: Callable[[], int], *, debug: bool) -> int:
    """Run a command; an error a user can mend is text and an exit code."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as in `| head`: nobody reads on
        # What is still buffered would raise once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except UserError as error:
        if debug:
            traceback.print_exc()
        elif str(error):
            sys.stderr.write(f"{error}\n")
        return error.code
    except (KeyboardInterrupt, Interrupted) as stop:
        if str(stop):
            sys.stderr.write(f"{stop}\n")
        return INTERRUPTED
