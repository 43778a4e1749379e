"""Output of a run: the console, log.txt, metrics.jsonl and samples.jsonl."""

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ..config.redaction import redact, redact_values
from ..cpu.kernel_cache import count_kernels
from ..errors import UserError
from ..files.atomic import disk_errors, require_held
from ..files.json_files import filter_jsonl, read_jsonl
from ..interfaces import Logger
from . import terminal
from .progress import Activity, ProgressBar, format_duration
from .tables import aligned
from .trackers import TrackerThread
from .work_rate import KindOfWork

# Longest silence of the log while a stage runs.
HEARTBEAT_SECONDS = 10
# Files with one record per line, which names its stage.
RECORD_FILES = ("metrics.jsonl", "samples.jsonl")


class RunLogger(Logger):
    """Log lines for people and JSONL records for programs.

    On a terminal the output has colors and a progress bar; elsewhere it is plain lines.
    Control characters and what looks like a token are removed. A run goes on when
    nobody reads its console output, because log.txt has the same lines.

    Args:
        folder: the run directory; None = only the console.
        quiet: print only warnings and tables to the console.
    """

    def __init__(self, folder: Path | None, *, quiet: bool = False):
        self.folder = folder
        self.quiet = quiet
        self.stage = ""
        self.trackers: list[TrackerThread] = []
        # Called by the heartbeat every `HEARTBEAT_SECONDS`.
        self.on_heartbeat: Callable[[], None] = lambda: None
        # What a terminal shows: `rich.live.Live`, or nothing.
        self.bar = None
        # What happens, from the outermost operation to the innermost one.
        self._running: list[ProgressBar | Activity] = []
        # When a line last said what happens, or any line if nothing runs.
        self._start = self._last_line = time.monotonic()
        # Kernels on the disk before the run, and when last counted; when that grew.
        self._first_kernels = self._kernels = count_kernels()
        self._compiled_at = -math.inf

    def info(self, text: str) -> None:
        """Log a line."""
        self.debug(text)
        if not self.quiet:
            self._show(text)

    def warning(self, text: str) -> None:
        """Log a warning; the console gets it on stderr, also when quiet."""
        self.debug(f"warning: {text}")
        self._show(f"warning: {text}", write=terminal.write_err)

    def debug(self, text: str) -> None:
        """Log lines to log.txt only."""
        if not self._running:
            self._last_line = time.monotonic()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = redact(terminal.printable(text), keys=False).split("\n")
        self._append("log.txt", "".join(f"{stamp} {line}\n" for line in lines))

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Print a table, also when quiet. Only the first column is left-aligned."""
        cells = [columns, *rows]
        text = "\n".join([title, *aligned(cells)])
        self.debug(text)
        if terminal.output_is_terminal():
            self._draw(title, cells)
        else:
            self._show(text)

    def metrics(self, record: dict) -> None:
        """Append a record to metrics.jsonl. Numbers that are not finite become null."""
        record = self._append_record("metrics.jsonl", record)
        for tracker in self.trackers:
            tracker.log(record)

    def sample(self, record: dict) -> None:
        """Append a record to samples.jsonl."""
        self._append_record("samples.jsonl", record)

    def truncate(self, step: int) -> None:
        """Drop this stage's records after `step`; the resumed run repeats them."""
        for name in RECORD_FILES:
            path = self.folder and self.folder / name
            if path and path.exists():
                filter_jsonl(path, lambda record: self._is_kept(record, step))

    @contextmanager
    def progress(
        self,
        total: float | Mapping[str, KindOfWork],
        description: str,
        *,
        percent: bool = False,
    ) -> Iterator[ProgressBar]:
        """A progress bar on a terminal, lines elsewhere, with the remaining time."""
        progress = ProgressBar(self, total, description, percent=percent)
        self._running.append(progress)
        try:
            yield progress
        finally:
            progress.close()

    def open_bar(self, progress: ProgressBar) -> None:
        """Show a progress on the last line of the terminal until `bar.stop()`."""
        from rich.live import Live

        console = _console()

        def drawn():
            inside = self._what_happens(after=progress)
            return _drawn(progress, console.width, inside)

        self.bar = Live(console=console, get_renderable=drawn)
        self.bar.start()

    def close_progress(self, progress: ProgressBar) -> None:
        """Forget a progress that has ended."""
        self._running.remove(progress)

    @contextmanager
    def activity(self, text: str) -> Iterator[None]:
        """What happens in the context, for the heartbeat and the bar of a terminal."""
        activity = Activity(text)
        self._running.append(activity)
        try:
            yield
        finally:
            self._running.remove(activity)

    def log_progress(self, line: str, *, on_screen: bool) -> None:
        """Log a line about what runs.

        Args:
            on_screen: a bar on a terminal shows the same; the line is for log.txt only.
        """
        self._last_line = time.monotonic()
        if on_screen:
            self.debug(line)
        else:
            self.info(line)

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Log what happens inside the context, every `HEARTBEAT_SECONDS` at least.

        Calls `on_heartbeat`, too.
        """
        stopped = threading.Event()

        def beat() -> None:
            last = time.monotonic()
            while not stopped.wait(HEARTBEAT_SECONDS / 10):
                self.break_silence()
                if time.monotonic() - last >= HEARTBEAT_SECONDS:
                    self.on_heartbeat()
                    last = time.monotonic()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()

    def break_silence(self) -> None:
        """Log what happens if the last line about it is `HEARTBEAT_SECONDS` old.

        Other lines have no time left, so they do not count while something runs.
        """
        kernels, now = count_kernels(), time.monotonic()
        if kernels > self._kernels:
            self._kernels, self._compiled_at = kernels, now
        if now - self._last_line < 0.9 * HEARTBEAT_SECONDS:
            return
        elapsed = format_duration(now - self._start)
        line = self._what_happens() or f"stage {self.stage}: {elapsed} since the start"
        # A full disk ends the stage where it writes its results.
        with suppress(UserError):
            self.log_progress(line, on_screen=self.bar is not None)

    def _what_happens(self, *, after: ProgressBar | None = None) -> str:
        """All open progresses, and the innermost activity.

        Args:
            after: leave out this progress, and those around it.
        """
        # A copy, as the other thread may end a progress meanwhile.
        running = [*self._running]
        if after in running:
            running = running[running.index(after) + 1 :]
        innermost = running[-1:]
        lines = [each.line() for each in running if isinstance(each, ProgressBar)]
        lines += [each.line() for each in innermost if isinstance(each, Activity)]
        if time.monotonic() - self._compiled_at < HEARTBEAT_SECONDS:
            count = self._kernels - self._first_kernels
            lines.append(f"compiling kernels, {count} so far")
        return "; ".join(lines)

    def _is_kept(self, record: dict, step: int) -> bool:
        done = record.get("step", 0)
        return record["stage"] != self.stage or (isinstance(done, int) and done <= step)

    def _append_record(self, name: str, record: dict) -> dict:
        values = {key: _finite(value) for key, value in record.items()}
        record = redact_values({"stage": self.stage} | values)
        self._append(name, json.dumps(record, ensure_ascii=False) + "\n")
        return record

    def _append(self, name: str, text: str) -> None:
        if self.folder is None:
            return
        path = self.folder / name
        # Unbuffered: each line is one write, so that a reader never sees a part.
        with disk_errors(path):
            require_held(path)
            with path.open("ab", buffering=0) as stream:
                stream.write(text.encode(errors="replace"))

    def _show(self, text: str, *, write=None) -> None:
        text = redact(text, keys=False)
        if self.bar is not None:
            text = terminal.printable(text)
            self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif write:
            write(f"{text}\n")
        else:
            terminal.write_out(f"{text}\n", tolerant=self.folder is not None)

    def _draw(self, title: str, cells: list[list[str]]) -> None:
        from rich.table import Table
        from rich.text import Text

        def plain(text: str) -> Text:
            return Text(terminal.printable(text))

        table = Table(title=plain(title), title_justify="left")
        for number, name in enumerate(cells[0]):
            table.add_column(plain(name), justify="right" if number else "left")
        for row in cells[1:]:
            table.add_row(*map(plain, row))
        console = self.bar.console if self.bar else _console()
        console.print(table)


def _console():
    """The standard output for rich, which adds styles to printable text."""
    from rich.console import Console

    return Console(file=terminal.StyledOutput())


def _drawn(progress: ProgressBar, width: int, inner: str):
    """A progress, and the text of what runs inside, on a terminal's last line."""
    from rich.progress_bar import ProgressBar as Bar
    from rich.table import Table
    from rich.text import Text

    before, share, bar, after = progress.on_screen(width, inner)
    line = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
    cells = [Text(terminal.printable(before), no_wrap=True)]
    if bar:
        cells.append(Bar(total=1, completed=share, width=bar))
    if after:
        cells.append(Text(terminal.printable(after), no_wrap=True))
    line.add_row(*cells)
    return line


def _finite(value):
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(run_dir: Path, stage: str | None = None) -> list[dict]:
    """The records in metrics.jsonl, oldest first: of a stage, or of all."""
    records = read_jsonl(run_dir / "metrics.jsonl", stage=str, kind=str, step=int)
    return [r for r in records if stage in (None, r["stage"])]
