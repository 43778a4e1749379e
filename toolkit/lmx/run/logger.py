"""Output of a run: the console, log.txt, metrics.jsonl and samples.jsonl."""

import json
import math
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .fs import disk_errors, write_atomic
from .trackers import TrackerThread

# Terminal escape sequences, and control characters except tab and newline.
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class RunLogger:
    """Log lines for people and JSONL records for programs.

    On a terminal the output has colors and a progress bar; elsewhere it is plain lines.
    Control characters are removed.

    Args:
        folder: the run directory; None = only the console.
        quiet: print only warnings and tables to the console.
    """

    def __init__(self, folder: Path | None, *, quiet: bool = False):
        self.folder = folder
        self.quiet = quiet
        self.stage = ""
        self.tracker: TrackerThread | None = None
        self._bar = None

    def info(self, text: str) -> None:
        """Log a line."""
        self.debug(text)
        if not self.quiet:
            self._show(text)

    def warning(self, text: str) -> None:
        """Log a warning; the console gets it on stderr, also when quiet."""
        self.debug(f"warning: {text}")
        self._show(f"warning: {text}", to=sys.stderr)

    def debug(self, text: str) -> None:
        """Log lines to log.txt only."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = _CONTROL.sub("", text).split("\n")
        self._append("log.txt", "".join(f"{stamp} {line}\n" for line in lines))

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Print a table, also when quiet. Only the first column is left-aligned."""
        cells = [columns, *rows]
        text = "\n".join([title, *_aligned(cells)])
        self.debug(text)
        if sys.stdout.isatty():
            self._draw(title, cells)
        else:
            self._show(text)

    def metrics(self, record: dict) -> None:
        """Append a record to metrics.jsonl. Numbers that are not finite become null."""
        record = self._append_record("metrics.jsonl", record)
        if self.tracker:
            self.tracker.log(record)

    def sample(self, record: dict) -> None:
        """Append a record to samples.jsonl."""
        self._append_record("samples.jsonl", record)

    def truncate(self, step: int) -> None:
        """Drop this stage's records after `step`; the resumed run repeats them."""
        for name in ("metrics.jsonl", "samples.jsonl"):
            path = self.folder and self.folder / name
            if path and path.exists():
                lines = path.read_text().splitlines(keepends=True)
                valid = [line for line in lines if self._is_valid(line, step)]
                write_atomic(path, "".join(valid))

    @contextmanager
    def progress(self, total: int, description: str) -> Iterator["ProgressBar"]:
        """A progress bar on a terminal, lines elsewhere, with the remaining time."""
        progress = ProgressBar(self, total, description)
        try:
            yield progress
        finally:
            progress.close()

    def _is_valid(self, line: str, step: int) -> bool:
        try:
            record = json.loads(line)
        except ValueError:
            # The last line of a killed run may be incomplete.
            return False
        return record["stage"] != self.stage or record.get("step", 0) <= step

    def _append_record(self, name: str, record: dict) -> dict:
        values = {key: _finite(value) for key, value in record.items()}
        record = {"stage": self.stage} | values
        self._append(name, json.dumps(record, ensure_ascii=False) + "\n")
        return record

    def _append(self, name: str, text: str) -> None:
        if self.folder is None:
            return
        path = self.folder / name
        # Unbuffered: each line is one write, so that a reader never sees a part.
        with disk_errors(path), path.open("ab", buffering=0) as stream:
            stream.write(text.encode(errors="replace"))

    def _show(self, text: str, *, to=None) -> None:
        text = _CONTROL.sub("", text)
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            stream = to or sys.stdout
            stream.write(text + "\n")
            stream.flush()

    def _draw(self, title: str, cells: list[list[str]]) -> None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(title), title_justify="left")
        for number, name in enumerate(cells[0]):
            table.add_column(Text(name), justify="right" if number else "left")
        for row in cells[1:]:
            table.add_row(*map(Text, row))
        console = self._bar.console if self._bar else Console()
        console.print(table)


class ProgressBar:
    """Progress of a long operation; made by `RunLogger.progress`."""

    def __init__(self, logger: RunLogger, total: int, description: str):
        self._logger = logger
        self._total = total
        self._description = description
        self._started: tuple[float, int] | None = None
        self._task = None
        # A terminal shows one bar at a time; nested operations log lines.
        if sys.stdout.isatty() and not logger.quiet and logger._bar is None:
            self._open_bar()

    def update(self, done: int, **values: float) -> None:
        """Show the progress, with values such as loss=2.5."""
        text = "  ".join(
            f"{name.replace('_', ' ')} {format_number(value)}"
            for name, value in values.items()
        )
        line = f"{self._description} {done}/{self._total}  {text}"
        if self._task is not None:
            self._logger.debug(line)
            self._logger._bar.update(self._task, completed=done, values=text)
        else:
            self._logger.info(f"{line}  {self._remaining(done)}".rstrip())

    def close(self) -> None:
        """Remove the bar from the screen."""
        if self._task is not None:
            self._logger._bar.stop()
            self._logger._bar = None

    def _open_bar(self) -> None:
        from rich import progress as rich
        from rich.table import Column

        # On a narrow terminal the values are truncated.
        bar = rich.Progress(
            rich.TextColumn("{task.description}"),
            rich.BarColumn(bar_width=20),
            rich.MofNCompleteColumn(),
            rich.TimeRemainingColumn(),
            rich.TextColumn(
                "{task.fields[values]}",
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            expand=True,
            # In slow trainings, updates are minutes apart.
            speed_estimate_period=600,
        )
        self._task = bar.add_task(self._description, total=self._total, values="")
        self._logger._bar = bar
        bar.start()

    def _remaining(self, done: int) -> str:
        now = time.monotonic()
        if self._started is None:
            self._started = (now, done)
            return ""
        start, first = self._started
        remaining = (now - start) / max(1, done - first) * (self._total - done)
        return f"about {format_duration(remaining)} left" if remaining else ""


def format_number(value: float) -> str:
    """A number with four significant digits and grouped thousands."""
    if isinstance(value, int):
        return f"{value:,}"
    if 1000 <= abs(value) < math.inf:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """A duration such as 45 s, 12 min or 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _finite(value):
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


class NullLogger(RunLogger):
    """No-op logger for ranks other than 0."""

    def __init__(self):
        super().__init__(None, quiet=True)

    def _show(self, text: str, *, to=None) -> None:
        pass
