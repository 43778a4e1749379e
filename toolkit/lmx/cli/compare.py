"""`lmx compare RUN RUN ...`: runs side by side."""

import argparse
import json
import sys
from pathlib import Path

from ..run.compare import RunSummary, figures_table, read_runs, recipe_table
from ..run.fs import write_atomic
from ..run.html.comparison import comparison
from ..run.logger import RunLogger

FIGURES = "the last model of every run, and how far it is from the first run's"
RECIPES = "values in which the recipes differ"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.description = "Show runs side by side, and what their recipes differ in."
    parser.add_argument("run", nargs="+", type=Path, help="run folder or logger.json")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page, too")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def run(arguments: argparse.Namespace) -> int:
    """Show the tables; returns the exit code."""
    sides = read_runs(arguments.run)
    if arguments.html:
        write_atomic(arguments.html, comparison(sides))
    if arguments.json:
        sys.stdout.write(json.dumps(_as_json(sides), indent=2) + "\n")
        return 0
    logger = RunLogger(None)
    logger.table(FIGURES, *figures_table(sides))
    columns, rows = recipe_table(sides)
    if rows:
        logger.info("")
        logger.table(RECIPES, columns, rows)
    if arguments.html:
        logger.info(str(arguments.html))
    return 0


def _as_json(sides: list[RunSummary]) -> dict:
    columns, rows = recipe_table(sides)
    return {
        "runs": [side.to_json() for side in sides],
        "differences": {
            key: dict(zip(columns[1:], v, strict=True)) for key, *v in rows
        },
    }
