"""`lmx report`, `lmx compare` and `lmx push`: what to do with finished runs."""

import argparse
import os
from pathlib import Path

from ..files.atomic import write_atomic
from ..run import terminal
from ..run.compare import comparison_table, read_runs, recipe_table, run_values
from ..run.html.page import comparison_page, write_page
from ..run.logger import RunLogger

TITLE = "metrics of the last model of every run, and the change from run 1"


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `lmx report`."""
    parser.description = (
        "Write report.html of a run again, from the files in its folder."
    )
    parser.add_argument("run", type=Path, help="run directory, e.g. exports/qat_4bit")


def report(arguments: argparse.Namespace) -> int:
    """Write the page and print its path; returns the exit code."""
    terminal.write_out(f"{write_page(arguments.run)}\n")
    return 0


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `lmx compare`."""
    parser.description = "Compare the metrics and recipes of runs."
    add = parser.add_argument
    add("run", nargs="+", type=Path, help="run directory or report.json")
    add("--html", type=Path, metavar="FILE", help="also write a page")
    add("--json", action="store_true", help="print JSON")


def compare(arguments: argparse.Namespace) -> int:
    """Print the tables; returns the exit code."""
    runs = read_runs(arguments.run)
    if arguments.html:
        write_atomic(arguments.html, comparison_page(runs))
    columns, rows = recipe_table(runs)
    if arguments.json:
        differences = {k: dict(zip(columns[1:], v, strict=True)) for k, *v in rows}
        listed = [run_values(name, run) for name, run in runs.items()]
        content = {"runs": listed, "differences": differences}
        terminal.write_json(content, indent=2)
        return 0
    logger = RunLogger(None)
    logger.table(TITLE, *comparison_table(runs))
    if rows:
        logger.info("")
        logger.table("recipe values that differ", columns, rows)
    if arguments.html:
        logger.info(str(arguments.html))
    return 0


def add_push_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `lmx push`."""
    parser.description = "Upload a model to the Hugging Face Hub."
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="model folder or run directory")
    about = "Hub repository, created if necessary"
    add("name", metavar="USER/NAME", help=about)
    add("--public", action="store_true", help="create it as public")


def push(arguments: argparse.Namespace) -> int:
    """Upload; the exit code is 0.

    Raises:
        UserError: the folder has no valid model, or the upload fails.
    """
    from ..convert.exporters import hub
    from ..models.checkpoint import model_folder

    folder = Path(os.path.expanduser(model_folder(arguments.folder)))
    logger = RunLogger(None)
    hub.push(folder, arguments.name, private=not arguments.public, info=logger.info)
    return 0
