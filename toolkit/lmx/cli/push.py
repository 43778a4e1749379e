"""`lmx push`: a checkpoint folder, published on the Hugging Face Hub."""

import argparse
import sys
from pathlib import Path

from ..models.checkpoint import model_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `lmx push`."""
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="model folder or run folder")
    add("name", metavar="USER/NAME", help="a repository of the Hub, made if need be")
    add("--public", action="store_true", help="make it for all to see")


def run(args: argparse.Namespace) -> int:
    """Push; the exit code is 0.

    Raises:
        UserError: no sound model is there, or the Hub refuses or breaks off.
    """
    from ..convert.exporters.hub import push

    folder = Path(model_folder(args.folder)).expanduser()
    push(folder, args.name, private=not args.public, info=_say)
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
