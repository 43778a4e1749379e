"""What `lmx-train`, `lmx quantize` and `lmx draft` do: run a recipe, or check it."""

import argparse
import os
import shlex
from dataclasses import replace

from ..config.redaction import redact
from ..errors import UserError
from ..run import terminal
from .options import add_recipe_options, recipe_of

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


def add_execution_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare overrides and how to run."""
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="set a value of the recipe"
    )
    parser.add_argument("--output", metavar="FOLDER", help="run directory")
    for flag, meaning in FLAGS.items():
        parser.add_argument(flag, action="store_true", help=meaning)


def add_find_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--find`, for a command that trains."""
    parser.add_argument(
        "--find",
        metavar="KEY",
        help="with --dry-run: the largest max_seq_length, batch_size or batch_tokens "
        "that fits into memory",
    )


def add_quantize_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `lmx quantize`."""
    _add_job(parser, "quantize", "Quantize a model after training, and export it.")


def quantize(arguments: argparse.Namespace) -> int:
    """Quantize a model; returns the exit code."""
    return execute(arguments, "quantize")


def add_draft_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `lmx draft`."""
    _add_job(parser, "draft", "Train a draft model for speculative decoding.")
    add_find_argument(parser)


def draft(arguments: argparse.Namespace) -> int:
    """Train a draft model; returns the exit code."""
    return execute(arguments, "draft")


def _add_job(parser: argparse.ArgumentParser, kind: str, about: str) -> None:
    parser.description = (
        f"{about} The options stand for a recipe, which is printed and kept in the run "
        "directory. The same command finds its run again."
    )
    add_recipe_options(parser, kind)
    add_execution_arguments(parser)


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
    from ..run.launcher import launched_rank

    find = getattr(arguments, "find", None)
    if find and not arguments.dry_run:
        raise UserError(
            "--find needs --dry-run", hint="it searches, and trains nothing"
        )
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
            find=find,
        )
    from ..pipeline.extensions import Extensions
    from ..pipeline.runner import run

    run(
        recipe.loaded,
        recipe.plan,
        restart=arguments.restart,
        ignore_limits=arguments.ignore_limits,
        quiet=arguments.quiet,
        command=_command(recipe, source, arguments),
        extensions=Extensions(allow_python="--allow-python" in kept_flags(arguments)),
    )
    return 0


def _command(recipe, source: str | None, arguments: argparse.Namespace) -> str:
    """The command that resumes the run."""
    if source:
        words = [source, *recipe.loaded.overrides]
    else:
        words = [str(recipe.output / "recipe.yaml"), f"output={recipe.output}"]
    return shlex.join(["lmx-train", *words, *kept_flags(arguments)])


def kept_flags(arguments: argparse.Namespace) -> list[str]:
    """The given flags that the same run needs again."""
    given = vars(arguments)
    return [flag for flag in KEPT_FLAGS if given.get(flag[2:].replace("-", "_"))]
