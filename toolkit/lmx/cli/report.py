"""`lmx report RUN`: make report.html again."""

import argparse
import sys
from pathlib import Path

from ..run.html.page import write_page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.description = (
        "Make report.html of a run again, from the files in its folder."
    )
    parser.add_argument("run", type=Path, help="a run folder, as exports/qat_4bit")


def run(arguments: argparse.Namespace) -> int:
    """Write the page and say where; returns the exit code."""
    sys.stdout.write(f"{write_page(arguments.run)}\n")
    return 0
