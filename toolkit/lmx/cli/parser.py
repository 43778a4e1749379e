"""An argument parser that knows option names of other tools."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from ..errors import USAGE, shorten
from ..run import terminal

# Option or verb: its name here.
KNOWN = {
    "import": "convert",
    "finetune": "train",
    "chat": "generate --chat",
    "server": "mlx_lm.server",
    "--overwrite": "--restart",
    "--force": "--ignore-limits",
    "--adapter": "--adapter-path",
    "--lora": "--adapter-path",
    "--draft": "--draft-model",
    "--speculative-model": "--draft-model",
    "--draft-tokens": "--num-draft-tokens",
    "--num-speculative-tokens": "--num-draft-tokens",
    "--temp": "--temperature",
    "--system-prompt": "--system",
    "--max-new-tokens": "--max-tokens",
    "--rank": "--lora-rank",
    "--lora-r": "--lora-rank",
    "--q-bits": "--bits",
    "--q-group-size": "--group-size",
    "--iters": "--steps",
    "--max-steps": "--steps",
    "--num-epochs": "--epochs",
    "--num-train-epochs": "--epochs",
    "--lr": "--learning-rate",
    "--max-length": "--max-seq-length",
    "--dataset": "--data",
    "--train-file": "--data",
    "--output-dir": "--output",
    "--config": "the recipe without an option",
}


class HintingParser(argparse.ArgumentParser):
    """A parser without abbreviations, whose errors hint at the right option."""

    def __init__(self, *args, **options):
        super().__init__(*args, allow_abbrev=False, **options)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace=None):
        """As in argparse; keeps the words for the hints of an error."""
        self._words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def _print_message(self, message: str, file=None) -> None:
        # argparse prints the help and the version here; `error` prints by itself.
        terminal.write_out(message)

    def error(self, message: str) -> NoReturn:
        """Print the usage, the message and a hint per known name; exit with 2."""
        words = [word.partition("=")[0].replace("_", "-") for word in self._words]
        known = self._option_string_actions
        hints = [
            f"\n    hint: {word} is called {KNOWN[word]} here"
            for word in dict.fromkeys(words)
            if word in KNOWN and word not in known and _applies(KNOWN[word], known)
        ]
        error = f"{self.prog}: error: {shorten(message)}{''.join(hints)}\n"
        terminal.write_err(self.format_usage() + error)
        raise SystemExit(USAGE)


def _applies(name: str, known: dict[str, argparse.Action]) -> bool:
    """Whether a name is no option, or one that the parser has."""
    return not name.startswith("--") or name in known
