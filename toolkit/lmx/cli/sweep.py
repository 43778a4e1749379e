"""`lmx sweep`: a recipe with several values and seeds, one run after the other."""

import argparse
import hashlib
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import yaml

from ..config.redaction import redact
from ..errors import FAILED, INTERRUPTED, Interrupted, UserError
from ..files.atomic import write_atomic
from ..run import manifest, terminal
from ..run.compare import SWEEP, groups_table
from ..run.html.page import comparison_page
from ..run.logger import RunLogger
from ..run.report import Record
from ..run.signals import sigterm_interrupts
from .execution import KEPT_FLAGS, kept_flags

PAGE = "compare.html"
# A process for each run, so that all its memory is free after it.
PROGRAM = "import sys; from lmx.cli.main import train; sys.exit(train())"
MAX_RUNS = 10_000
# Of a folder's name: a longer one ends with a hash.
NAME_CHARACTERS, HASH_CHARACTERS = 100, 8
# Names as they are: letters, digits and what is safe in a path.
UNSAFE = re.compile(r"[^\w.+,=-]")


@dataclass(frozen=True)
class PlannedRun:
    """A run of the sweep.

    Attributes:
        values: its overrides.
        hash: of its recipe.
    """

    values: dict[str, str]
    folder: Path
    hash: str

    @property
    def is_done(self) -> bool:
        """Whether the folder has the finished run of this recipe."""
        try:
            content = manifest.read(self.folder) or {}
        except UserError:  # the run itself reports it
            return False
        is_same = content.get("recipe_hash") == self.hash
        return is_same and content["status"] == "done"

    @property
    def record(self) -> Record | None:
        """Its results; None if it has not started, or if its files are damaged."""
        try:
            return Record(self.folder)
        except UserError:  # one run must not end the others
            return None


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `lmx sweep`."""
    parser.description = (
        "Run a recipe with every combination of some values, one after the other. "
        "The same command skips finished runs and resumes an interrupted one. Exit "
        "code 1: at least one run failed."
    )
    add = parser.add_argument
    add("recipe", help="a YAML file or a bundled recipe")
    add(
        "overrides",
        nargs="*",
        metavar="key=value,...",
        help="values to try; a list in brackets is one value",
    )
    add("--output", metavar="FOLDER", help="default: exports/<recipe>-sweep")
    add("--dry-run", action="store_true", help="check all recipes and list the runs")
    for flag in KEPT_FLAGS:
        add(flag, action="store_true", help="as of lmx-train, for every run")
    add("--quiet", action="store_true", help="print only warnings and results")


def sweep(arguments: argparse.Namespace) -> int:
    """Run everything that is not finished; returns the exit code.

    Raises:
        ConfigErrors: of the first combination that is not valid; nothing was run.
        UserError: the arguments are not valid.
        Interrupted: Ctrl-C or SIGTERM; resumable.
    """
    from ..api.recipe import Recipe

    given = arguments.output
    folder, runs = Path(os.path.expanduser(given)) if given else None, []
    for values in expand(arguments.overrides):
        overrides = [f"{key}={value}" for key, value in values.items()]
        recipe = Recipe(arguments.recipe, overrides=overrides)
        folder = folder or Path("exports") / f"{recipe.name}-sweep"
        runs.append(PlannedRun(values, folder / folder_name(values), recipe.hash))
    assert folder, "a sweep has runs"
    if arguments.dry_run:
        lines = [
            f"{'done' if run.is_done else 'to run':<8}{run.folder}" for run in runs
        ]
        terminal.write_out("\n".join([*lines, f"{len(runs)} runs"]) + "\n")
        return 0
    logger = RunLogger(None, quiet=arguments.quiet)
    with sigterm_interrupts():
        try:
            failed = _run_all(arguments, runs, logger)
        finally:
            # The runs that have started are compared.
            swept = [(run.values, run.record) for run in runs]
            groups = groups_table(swept)
            if records := {r.path.name: r for _, r in swept if r}:
                page = comparison_page(records, title=folder.name, groups=groups)
                write_atomic(folder / PAGE, page)
    logger.table(SWEEP, *groups)
    logger.info(str(folder / PAGE))
    for run, code in failed.items():
        logger.warning(f"failed with exit code {code}: {run}")
    return FAILED if failed else 0


def expand(arguments: list[str]) -> list[dict[str, str]]:
    """The overrides of every combination of `key=value,value,...`, each once.

    Raises:
        UserError: an argument is no override, is repeated, or sets the run directory.
    """
    axes: dict[str, list[str]] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key:
            raise UserError(
                f"'{argument}' is not of the form key=value",
                hint="stages.train.learning_rate=1e-4,3e-4 seed=0,1,2",
            )
        if key == "output":
            raise UserError(
                "every run of a sweep has its own folder",
                place=argument,
                hint="--output FOLDER sets the folder of the sweep",
            )
        if key in axes:
            raise UserError(f"{key} is given twice", hint=f"{key}=value,value,...")
        axes[key] = [*dict.fromkeys(_split(text))]
    if (count := math.prod(map(len, axes.values()))) > MAX_RUNS:
        raise UserError(f"this sweep has {count:,} runs; the limit is {MAX_RUNS:,}")
    return [dict(zip(axes, row, strict=True)) for row in product(*axes.values())]


def _split(text: str) -> list[str]:
    """The values between commas that are not in brackets or quotes, as written."""
    listed = f"[{text}]"
    try:
        values = yaml.compose(listed, Loader=yaml.SafeLoader).value
    except yaml.YAMLError:  # the recipe reports it
        return [text]
    marks = ((value.start_mark.index, value.end_mark.index) for value in values)
    return [listed[start:end].strip() for start, end in marks] or [""]


def folder_name(values: dict[str, str]) -> str:
    """The name of the folder of a run, the same in every sweep with these values."""
    text = "_".join(f"{key}={value}" for key, value in values.items()) or "recipe"
    name = UNSAFE.sub("-", text.removeprefix("stages.").replace("_stages.", "_"))
    name = name[:NAME_CHARACTERS]
    if text.replace("stages.", "") == name:
        return name
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{name}-{digest[:HASH_CHARACTERS]}"


def _run_all(
    arguments: argparse.Namespace, runs: list[PlannedRun], logger: RunLogger
) -> dict[Path, int]:
    """Run what is not finished; returns the exit codes of failed runs by folder.

    Raises:
        Interrupted: by the user.
    """
    failed: dict[Path, int] = {}
    waiting = [run for run in runs if not run.is_done]
    finished = len(runs) - len(waiting)
    if finished:
        logger.info(f"{finished} of {len(runs)} runs are already finished")
    options = kept_flags(arguments) + ["--quiet"] * arguments.quiet
    for number, run in enumerate(waiting, finished + 1):
        logger.info(f"run {number} of {len(runs)}: {redact(run.folder.name)}")
        overrides = [f"{key}={value}" for key, value in run.values.items()]
        words = [arguments.recipe, *overrides, f"output={run.folder}", *options]
        code = _run(words)
        if code == INTERRUPTED:
            again = ["lmx", "sweep", arguments.recipe]
            again += [*map(redact, arguments.overrides), *kept_flags(arguments)]
            if arguments.output:
                again += ["--output", arguments.output]
            command = shlex.join(again)
            raise Interrupted(f"the sweep is interrupted; to resume: {command}")
        if code:
            failed[run.folder] = code
            logger.warning(f"this run failed with exit code {code}; the sweep goes on")
    return failed


def _run(words: list[str]) -> int:
    """Run lmx-train with these arguments in a process; returns its exit code.

    It has its own session, so that Ctrl-C reaches it once, from here.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        process.wait()
        return INTERRUPTED
