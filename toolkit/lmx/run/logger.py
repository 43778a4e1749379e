"""What a run tells: the console, log.txt, metrics.jsonl and samples.jsonl."""

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

# What a terminal would obey: escape sequences, and control characters but tab and line.
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class RunLogger:
    """Lines for people and rows for programs.

    On a terminal there is colour and a live bar; elsewhere plain lines, flushed. What
    goes into the files never has control characters.

    Args:
        folder: the run folder, or None for the console alone.
        quiet: only warnings and tables reach the console.
    """

    def __init__(self, folder: Path | None, *, quiet: bool = False):
        self.folder = folder
        self.quiet = quiet
        self.stage = ""
        self.tracking: TrackerThread | None = None
        self._bar = None

    def info(self, text: str) -> None:
        """A line of progress."""
        self.debug(text)
        if not self.quiet:
            self._show(text)

    def warning(self, text: str) -> None:
        """A line nobody should miss."""
        self.debug(f"warning: {text}")
        self._show(f"warning: {text}", to=sys.stderr)

    def debug(self, text: str) -> None:
        """Lines for log.txt alone."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = _CONTROL.sub("", text).split("\n")
        self._append("log.txt", "".join(f"{stamp} {line}\n" for line in lines))

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """A table, also when quiet; only the first column is aligned to the left."""
        cells = [columns, *rows]
        text = "\n".join([title, *_aligned(cells)])
        self.debug(text)
        if sys.stdout.isatty():
            self._draw(title, cells)
        else:
            self._show(text)

    def metrics(self, row: dict) -> None:
        """One row of metrics.jsonl; what is not a finite number becomes null."""
        row = self._append_row("metrics.jsonl", row)
        if self.tracking:
            self.tracking.log(row)

    def sample(self, row: dict) -> None:
        """One row of samples.jsonl."""
        self._append_row("samples.jsonl", row)

    def truncate(self, step: int) -> None:
        """Drop this stage's rows beyond `step`, which a resumed run writes again."""
        for name in ("metrics.jsonl", "samples.jsonl"):
            path = self.folder and self.folder / name
            if path and path.exists():
                lines = path.read_text().splitlines(keepends=True)
                kept = [line for line in lines if self._is_kept(line, step)]
                write_atomic(path, "".join(kept))

    @contextmanager
    def progress(self, total: int, description: str) -> Iterator["ProgressBar"]:
        """A bar with the time left on a terminal, lines elsewhere."""
        progress = ProgressBar(self, total, description)
        try:
            yield progress
        finally:
            progress.close()

    def _is_kept(self, line: str, step: int) -> bool:
        try:
            row = json.loads(line)
        except ValueError:
            # Half a row, where a run was killed.
            return False
        return row["stage"] != self.stage or row.get("step", 0) <= step

    def _append_row(self, name: str, row: dict) -> dict:
        row = {"stage": self.stage} | {key: _finite(row[key]) for key in row}
        self._append(name, json.dumps(row, ensure_ascii=False) + "\n")
        return row

    def _append(self, name: str, text: str) -> None:
        if self.folder is None:
            return
        path = self.folder / name
        # Unbuffered: a line is one write, whole for whoever reads along.
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
    """Progress of one long piece of work; made by `Report.progress`."""

    def __init__(self, logger: RunLogger, total: int, description: str):
        self._logger = logger
        self._total = total
        self._description = description
        self._started: tuple[float, int] | None = None
        self._task = None
        # A terminal has room for one live display; work inside other work has lines.
        if sys.stdout.isatty() and not logger.quiet and logger._bar is None:
            self._open_bar()

    def update(self, done: int, **numbers: float) -> None:
        """Say how far the work is, with figures such as loss=2.5."""
        figures = "  ".join(
            f"{name.replace('_', ' ')} {format_number(value)}"
            for name, value in numbers.items()
        )
        line = f"{self._description} {done}/{self._total}  {figures}"
        if self._task is not None:
            self._logger.debug(line)
            self._logger._bar.update(self._task, completed=done, figures=figures)
        else:
            self._logger.info(f"{line}  {self._remaining(done)}".rstrip())

    def close(self) -> None:
        """Take the bar off the screen's last line."""
        if self._task is not None:
            self._logger._bar.stop()
            self._logger._bar = None

    def _open_bar(self) -> None:
        from rich import progress as rich
        from rich.table import Column

        # The figures are what gives way on a narrow terminal.
        bar = rich.Progress(
            rich.TextColumn("{task.description}"),
            rich.BarColumn(bar_width=20),
            rich.MofNCompleteColumn(),
            rich.TimeRemainingColumn(),
            rich.TextColumn(
                "{task.fields[figures]}",
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            expand=True,
            # Updates of slow training are minutes apart.
            speed_estimate_period=600,
        )
        self._task = bar.add_task(self._description, total=self._total, figures="")
        self._logger._bar = bar
        bar.start()

    def _remaining(self, done: int) -> str:
        now = time.monotonic()
        if self._started is None:
            self._started = (now, done)
            return ""
        since, first = self._started
        left = (now - since) / max(1, done - first) * (self._total - done)
        return f"about {format_duration(left)} left" if left else ""


def format_number(value: float) -> str:
    """Four significant digits, thousands grouped, small numbers with an exponent."""
    if isinstance(value, int):
        return f"{value:,}"
    if 1000 <= abs(value) < math.inf:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """45 s, 12 min, 3.5 h."""
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
    """Tells nobody anything: the first process does."""

    def __init__(self):
        super().__init__(None, quiet=True)

    def _show(self, text: str, *, to=None) -> None:
        pass
