"""`lmx sweep`: a recipe with several values and seeds, one run after the other."""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ..config.grid import expand, folder_name, read_lines
from ..config.redaction import redact
from ..config.text_files import read_text
from ..errors import FAILED, INTERRUPTED, Interrupted, UserError
from ..run import manifest, terminal
from ..run.compare import read_runs
from ..run.fs import write_atomic
from ..run.html.page import comparison_page
from ..run.logger import RunLogger
from ..run.progress import format_duration
from ..run.signals import sigterm_interrupts
from ..run.sweep_summary import SweepRun, groups_table, narrower
from .execution import KEPT_FLAGS, kept_flags

PAGE = "compare.html"
TITLE = "means ± standard errors over the seeds of finished runs"
# A process for each run, so that all its memory is free after it.
PROGRAM = "import sys; from lmx.cli.main import train; sys.exit(train())"
MAX_BYTES = 1 << 20


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
        content = _manifest(self.folder)
        return (
            content is not None
            and content["status"] == "done"
            and content["recipe_hash"] == self.hash
        )

    @property
    def overrides(self) -> list[str]:
        """The arguments of lmx-train after the recipe."""
        pairs = [f"{key}={value}" for key, value in self.values.items()]
        return [*pairs, f"output={self.folder}"]


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
    add("--list", metavar="FILE", help="a file with the overrides of one run per line")
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
    folder, runs = _plan(arguments)
    if arguments.dry_run:
        lines = [
            f"{'done' if run.is_done else 'to run':<8}{run.folder}" for run in runs
        ]
        terminal.write_out("\n".join([*lines, f"{len(runs)} runs"]) + "\n")
        return 0
    logger = RunLogger(None, quiet=arguments.quiet)
    with sigterm_interrupts():
        failed = _run_all(arguments, folder, runs, logger)
    logger.table(TITLE, *narrower(*groups_table(_summaries(runs))))
    logger.info(str(folder / PAGE))
    for run, code in failed.items():
        logger.warning(f"failed with exit code {code}: {runs[run].folder}")
    return FAILED if failed else 0


def _plan(arguments: argparse.Namespace) -> tuple[Path, list[PlannedRun]]:
    """The folder of the sweep and its runs, all of whose recipes are valid."""
    from ..api.recipe import Recipe

    lines = []
    if arguments.list:
        text = read_text(Path(arguments.list), "list of overrides", max_bytes=MAX_BYTES)
        lines = read_lines(text)
    combinations = expand(arguments.overrides, lines)
    given = arguments.output
    folder, runs = Path(os.path.expanduser(given)) if given else None, []
    for values in combinations:
        overrides = [f"{key}={value}" for key, value in values.items()]
        recipe = Recipe(arguments.recipe, overrides=overrides)
        folder = folder or Path("exports") / f"{recipe.name}-sweep"
        runs.append(PlannedRun(values, folder / folder_name(values), recipe.hash))
    assert folder, "a sweep has runs"
    return folder, runs


def _run_all(
    arguments: argparse.Namespace,
    folder: Path,
    runs: list[PlannedRun],
    logger: RunLogger,
) -> dict[int, int]:
    """Run what is not finished; returns the exit codes of failed runs by number.

    Raises:
        Interrupted: by the user.
    """
    failed: dict[int, int] = {}
    waiting = [index for index, run in enumerate(runs) if not run.is_done]
    if finished := len(runs) - len(waiting):
        logger.info(f"{finished} of {len(runs)} runs are already finished")
    options = kept_flags(arguments) + ["--quiet"] * arguments.quiet
    start = time.monotonic()
    for position, index in enumerate(waiting):
        left = ""
        if position:
            seconds = (time.monotonic() - start) / position * (len(waiting) - position)
            left = f"  about {format_duration(seconds)} left"
        name = redact(runs[index].folder.name)
        logger.info(f"run {finished + position + 1} of {len(runs)}: {name}{left}")
        code = _run([arguments.recipe, *runs[index].overrides, *options])
        if code == INTERRUPTED:
            command = shlex.join(["lmx", *_words(arguments)])
            raise Interrupted(f"the sweep is interrupted; to resume: {command}")
        if code:
            failed[index] = code
            logger.warning(f"this run failed with exit code {code}; the sweep goes on")
        _write_page(folder, runs)
    _write_page(folder, runs)
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


def _words(arguments: argparse.Namespace) -> list[str]:
    """The command line, without secrets."""
    words = ["sweep", arguments.recipe, *map(redact, arguments.overrides)]
    for option in ("list", "output"):
        if value := getattr(arguments, option):
            words += [f"--{option}", value]
    return words + kept_flags(arguments)


def _manifest(folder: Path) -> dict | None:
    """The manifest of a run; None without one, or if it is damaged."""
    try:
        return manifest.read(folder)
    except UserError:  # the run itself reports it
        return None


def _summaries(runs: list[PlannedRun]) -> list[SweepRun]:
    started = [run for run in runs if _manifest(run.folder) and _reads(run.folder)]
    read = read_runs([run.folder for run in started]) if started else []
    summaries = dict(zip((run.folder for run in started), read, strict=True))
    return [SweepRun(run.values, summaries.get(run.folder)) for run in runs]


def _reads(folder: Path) -> bool:
    """Whether the files of a run are not damaged: one run must not end the others."""
    try:
        return bool(read_runs([folder]))
    except UserError:
        return False


def _write_page(folder: Path, runs: list[PlannedRun]) -> None:
    """Write the comparison of the runs that have started."""
    swept = _summaries(runs)
    if summaries := [run.summary for run in swept if run.summary]:
        groups = (TITLE, *narrower(*groups_table(swept)))
        page = comparison_page(summaries, title=folder.name, groups=groups)
        write_atomic(folder / PAGE, page)
