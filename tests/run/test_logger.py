"""RunLogger: log lines for people, JSONL for programs, no control characters."""

import io
import json
import re
import sys
import time

import pytest
from lmx.errors import UserError
from lmx.run.logger import HEARTBEAT_SECONDS, RunLogger
from lmx.run.progress import format_duration, format_number
from lmx.run.work_rate import KindOfWork, WorkRate


class Terminal(io.StringIO):
    def isatty(self):
        return True


def open_terminal(monkeypatch, *, columns=200):
    """Make the standard output a terminal, and return its screen."""
    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", screen)
    return screen


@pytest.fixture
def logger(tmp_path):
    logger = RunLogger(tmp_path)
    logger.stage = "1-train"
    return logger


def records(logger, name="metrics.jsonl"):
    return [json.loads(line) for line in (logger.folder / name).open()]


def logged(logger):
    return (logger.folder / "log.txt").read_text()


def test_lines_reach_console_and_log_file_without_escapes(logger, capsys):
    logger.info("one a\x1b[31mred\x1b[0m\x07\x1b[2Jb\tc\rd")
    logger.warning("two\nout/secret: damaged, made again")
    printed = capsys.readouterr()
    assert printed.out == "one aredb\tcd\n"
    # Secrets are removed, and the name of a path is none.
    assert printed.err == "warning: two\nout/secret: damaged, made again\n"
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    lines = ["one aredb\tcd", "warning: two", "out/secret: damaged, made again"]
    assert re.fullmatch("".join(f"{stamp} {x}\n" for x in lines), logged(logger))


def test_quiet_keeps_warnings_tables_and_the_log_file(tmp_path, capsys):
    logger = RunLogger(tmp_path, quiet=True)
    logger.info("hidden")
    logger.warning("seen")
    rows = [["perplexity", "10.5", "7"], ["size", "1", "-"]]
    logger.table("try", ["", "base", "tuned"], rows)
    with logger.progress(2, "training") as bar:
        bar.update(1, loss=3.0)
    printed = capsys.readouterr()
    assert printed.err == "warning: seen\n"
    assert printed.out.splitlines() == [
        "try",
        "            base  tuned",
        "perplexity  10.5      7",
        "size           1      -",
    ]
    for text in ("hidden", "perplexity  10.5      7\n", "training 1/2"):
        assert text in logged(logger)


def test_logger_without_folder_writes_no_files(capsys):
    logger = RunLogger(None)
    logger.info("one")
    logger.metrics({"loss": 1.0})
    logger.truncate(0)
    assert capsys.readouterr().out == "one\n"


def test_logger_on_a_terminal_shows_only_the_escapes_of_rich(logger, monkeypatch):
    screen = open_terminal(monkeypatch)
    hostile = "\x1b]0;title\x07\x9b2J\u202e[red]name[/red]"
    logger.table(hostile, ["", hostile], [[hostile, "1"]])
    with logger.progress(4, hostile) as bar:
        bar.advance(1, hostile)
        logger.info(hostile)
        logger.warning(hostile)
        logger.table(hostile, ["", hostile], [[hostile, "1"]])
    text = screen.getvalue()
    assert text.count("[red]name[/red]") >= 9
    assert not re.search("\x1b]|[\x07\x9b\u202e]", text)
    assert "\x1b" not in logged(logger)


def test_lost_console_is_no_error_of_a_run(logger, monkeypatch):
    with open("/dev/full", "w") as stream:
        for console, words in ((stream, "one two"), (None, "three four")):
            monkeypatch.setattr(sys, "stdout", console)
            monkeypatch.setattr(sys, "stderr", console)
            first, second = words.split()
            logger.info(first)
            logger.warning(second)
    logger.table("five", ["", "six"], [["seven", "1"]])
    words = [line.split()[-1] for line in logged(logger).splitlines()]
    assert words == ["one", "two", "three", "four", "five", "six", "1"]
    # Without a log file the console is all there is.
    with pytest.raises(UserError, match="cannot write to the standard output"):
        RunLogger(None).info("one")


def test_metrics_records_have_stage_and_valid_json(logger):
    logger.metrics({"step": 1, "loss": float("nan"), "peak": float("inf"), "name": "ü"})
    logger.sample({"step": 1, "answer": "\ud800 half a pair\n"})
    assert records(logger) == [
        {"stage": "1-train", "step": 1, "loss": None, "peak": None, "name": "ü"}
    ]
    assert records(logger, "samples.jsonl")[0]["answer"].endswith("half a pair\n")


def test_truncate_drops_records_after_the_step(logger):
    logger.metrics({"kind": "train", "step": 30})
    logger.stage = "2-train"
    for step in (10, 20, 30):
        logger.metrics({"kind": "train", "step": step})
    logger.sample({"step": 30})
    with (logger.folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"stage": "2-train", "st')
    logger.truncate(20)
    logger.metrics({"kind": "train", "step": 30})
    assert [(record["stage"], record["step"]) for record in records(logger)] == [
        ("1-train", 30),
        ("2-train", 10),
        ("2-train", 20),
        ("2-train", 30),
    ]
    assert records(logger, "samples.jsonl") == []


def test_logger_reports_disk_errors(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file, not a folder"):
        RunLogger(tmp_path / "file", quiet=True).info("one")


def test_progress_without_terminal_is_plain_lines(logger, capsys, monkeypatch):
    clock = set_clock(monkeypatch)
    with logger.progress(40, "training") as bar:
        clock[0] += 10
        bar.update(10, loss=2.51234, learning_rate=2e-4)
        clock[0] += 10
        bar.update(20, loss=2.0)
        clock[0] += 20
        bar.update(40, loss=1.5)
    assert capsys.readouterr().out.splitlines() == [
        "training 10/40  loss 2.512  learning rate 0.0002  about 30 s left",
        "training 20/40  loss 2  about 20 s left",
        "training 40/40  loss 1.5",
    ]
    assert "about 20 s left" in logged(logger)


def set_clock(monkeypatch) -> list[float]:
    """Return the seconds that the logger sees."""
    clock = [100.0]
    monkeypatch.setattr("lmx.run.work_rate.time.monotonic", lambda: clock[0])
    return clock


def test_silence_is_broken_by_the_progress_with_the_time_left(
    logger, capsys, monkeypatch
):
    clock = set_clock(monkeypatch)

    def beats(seconds: int) -> list[str]:
        for _ in range(seconds):
            clock[0] += 1
            logger.break_silence()
        return capsys.readouterr().out.splitlines()

    logger.info("stage 1-train")
    capsys.readouterr()
    assert beats(8) == []
    (line,) = beats(1)
    assert line.startswith("stage 1-train: ")
    assert line.endswith(" since the start")
    with logger.activity("writing"), logger.activity("reading weights"):
        assert beats(9) == ["reading weights for 9 s"]
    with logger.progress(4e9, "quantizing", percent=True) as bar:
        bar.advance(0, "block 1 of 4")
        clock[0] += 5
        bar.advance(1e9, "block 2 of 4")
        # 15 seconds, and the line comes 4 seconds later.
        assert beats(9) == ["quantizing 25%  block 2 of 4  about 11 s left"]
        with logger.progress(2, "inner") as inner:
            clock[0] += 8
            inner.advance()
            outer = "quantizing 25%  block 2 of 4  about 10 s left"
            assert beats(1) == [f"{outer}; inner 1/2  about 7 s left"]
            inner.advance()
            with logger.activity("saving"):
                assert beats(9)[0].endswith("; inner 2/2; saving for 9 s")
        bar.advance(9e9)
        assert beats(9) == ["quantizing 100%  block 2 of 4"]
    assert len(beats(30)) == 3
    assert "block 2 of 4  about 11 s left" in logged(logger)


@pytest.mark.parametrize(
    "seconds",
    [
        40 * [1],
        [20, *40 * [1]],  # kernels are compiled first
        4 * [*9 * [1], 4],  # validation after every tenth step
        2 * [95],  # two models
        [1 + step / 60 for step in range(30)],
    ],
    ids=["steady", "compiles", "validates", "two", "slower"],
)
def test_time_left_is_right_within_half_of_it(monkeypatch, seconds):
    """From the first amount after the first one on, also between two amounts."""
    clock = set_clock(monkeypatch)
    rate = WorkRate({"": KindOfWork(len(seconds))})
    end = clock[0] + sum(seconds)
    checked = 0
    for done, duration in enumerate(seconds):
        for _ in range(4):
            if done > (len(seconds) > 2):
                left = rate.seconds_left()
                true = end - clock[0]
                assert left <= 1.5 * true + 3
                assert true <= 1.5 * left + 3
                checked += 1
            clock[0] += duration / 4
        rate.count({"": 1})
    assert checked >= 4
    assert rate.seconds_left() is None


def test_heartbeat_breaks_silence_and_calls_back(logger, capsys, monkeypatch):
    monkeypatch.setattr("lmx.run.logger.HEARTBEAT_SECONDS", 0.1)
    calls = []
    logger.on_heartbeat = lambda: calls.append(time.monotonic())
    with logger.heartbeat():
        time.sleep(0.5)
        lines = capsys.readouterr().out.splitlines()
        silent = len(calls)
        for _ in range(10):
            time.sleep(0.05)
            logger.info("a line")
    assert len(lines) >= 2
    assert all(line.endswith(" since the start") for line in lines)
    # Also while lines are logged.
    assert silent + 2 <= len(calls) <= 10
    capsys.readouterr()
    time.sleep(0.2)
    assert capsys.readouterr().out == ""


def test_heartbeat_on_a_terminal_writes_to_the_log_file(logger, monkeypatch):
    open_terminal(monkeypatch)
    clock = set_clock(monkeypatch)
    logger.info("stage 2-evaluate")
    with logger.progress(4, "evaluating") as bar:
        clock[0] += 5
        bar.advance()
        clock[0] += HEARTBEAT_SECONDS / 2
        bar.advance()
        logger.break_silence()
    assert "evaluating 2/4  about 10 s left" in logged(logger)


def test_heartbeat_repeats_no_old_values(tmp_path, capsys, monkeypatch):
    """It has the step and the time left."""
    clock, logger = set_clock(monkeypatch), RunLogger(tmp_path)
    with logger.progress(40, "training") as bar:
        bar.advance(0, "first step")
        clock[0] += 9
        logger.break_silence()
        bar.skip(1)
        bar.advance(0, "")
        clock[0] += 1
        bar.update(2, loss=2.5)
        clock[0] += 9
        bar.advance(9)
        logger.break_silence()
    assert capsys.readouterr().out.splitlines() == [
        "training 0/40  first step",
        "training 2/40  loss 2.5  about 38 s left",
        "training 11/40  about 29 s left",
    ]


@pytest.mark.parametrize("write", ["info", "debug"])
def test_other_lines_do_not_hide_the_time_left(tmp_path, capsys, monkeypatch, write):
    """A quantizer logs each layer, which says nothing about the end."""
    clock, logger = set_clock(monkeypatch), RunLogger(tmp_path)
    with logger.progress(4, "quantization") as bar:
        for _ in range(3):
            clock[0] += HEARTBEAT_SECONDS
            bar.advance()
            getattr(logger, write)("model.layers.0: error .01")
            logger.break_silence()
    for lines in (capsys.readouterr().out, logged(logger)):
        assert "quantization 2/4  about 20 s left" in lines
        assert lines.count("quantization") == 3


@pytest.mark.parametrize("write", ["info", "warning", "debug"])
def test_any_line_breaks_the_silence_while_nothing_runs(tmp_path, monkeypatch, write):
    clock, logger = set_clock(monkeypatch), RunLogger(tmp_path)
    for _ in range(3):
        clock[0] += HEARTBEAT_SECONDS
        getattr(logger, write)("a line")
        logger.break_silence()
    assert "since the start" not in logged(logger)


def test_heartbeat_says_that_kernels_are_compiled(tmp_path, capsys, monkeypatch):
    clock = set_clock(monkeypatch)
    monkeypatch.setattr("lmx.cpu.kernel_cache.kernel_cache", lambda: tmp_path)
    logger = RunLogger(tmp_path)
    with logger.progress(4, "training"):
        for number in range(9):
            (tmp_path / f"kernel{number}.so").touch()
            clock[0] += 1
            logger.break_silence()
        for seconds in (9, 20):
            clock[0] += seconds
            logger.break_silence()
    compiling = "training 0/4; compiling kernels, 9 so far"
    assert capsys.readouterr().out.splitlines() == [
        *(compiling, compiling, "training 0/4")
    ]


def test_share_never_falls(logger, monkeypatch):
    """Not even if more work is found, or if other work turns out to be slow."""
    clock = set_clock(monkeypatch)
    kinds = {"tokens": KindOfWork(100), "steps": KindOfWork(100, 0.1)}
    shares = []
    with logger.progress(kinds, "evaluating", percent=True) as bar:
        for tokens, steps, found in [(20, 0, 0), (0, 50, 400), (80, 0, 0), (0, 450, 0)]:
            clock[0] += 1 + steps
            bar.advance({"tokens": tokens, "steps": steps})
            kinds["steps"].total += found
            shares.append(int(re.search(r"(\d+)%", bar.line())[1]))
    assert shares == sorted(shares)
    assert shares[-1] == 100


def test_progress_on_terminal_is_a_bar_and_the_log_file_is_plain(logger, monkeypatch):
    terminal = open_terminal(monkeypatch)
    with logger.progress(40, "training") as bar:
        bar.update(10, loss=2.5)
        logger.info("a line [with] brackets")
        with logger.progress(2, "inner") as inner:
            inner.update(1)
            logger.bar.refresh()
        bar.update(40, loss=1.5)
    screen = terminal.getvalue()
    assert "\x1b[" in screen
    assert "40/40" in screen
    assert "loss 1.5" in screen
    assert "a line [with] brackets" in screen
    assert "10/40" in screen
    # As a line, and beside the bar.
    assert screen.count("inner 1/2") == 2
    assert "\x1b" not in logged(logger)
    assert "training 10/40  loss 2.5" in logged(logger)
    before = len(terminal.getvalue())
    logger.info("after")
    assert terminal.getvalue()[before:] == "after\n"


def test_the_last_state_of_a_bar_is_its_own(logger, monkeypatch):
    terminal = open_terminal(monkeypatch)
    with logger.activity("writing files"), logger.progress(2, "inner") as bar:
        bar.update(2)
    assert "writing files" not in terminal.getvalue()


METRICS = {
    "loss": 2.51234,
    "learning_rate": 1.2345e-4,
    "trained_tokens_per_second": 1234.5,
    "peak_memory_gb": 0.4321,
    "gradient_norm": 1.234,
}


def screen_lines(terminal):
    """Every state of the last line of a terminal."""
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    return [line for line in re.split(r"[\r\n]", text) if line]


@pytest.mark.parametrize(
    ("columns", "pattern"),
    [
        (20, "training 1238/4000"),
        (40, r"training 1238/4000 23 min left loss 2\.5.*|training.*left"),
        (
            90,
            "training 1238/4000 [━╸╺ ]+ 23 min left loss 2.512 lr 0.00012 "
            "1,234 trained tok/s 0.4 GB",
        ),
        (
            120,
            "training 1238/4000 [━╸╺ ]{20,} 23 min left loss 2.512 lr 0.00012 "
            "1,234 trained tok/s 0.4 GB gradient norm 1.234",
        ),
    ],
)
def test_progress_fits_the_terminal(logger, monkeypatch, columns, pattern):
    terminal = open_terminal(monkeypatch, columns=columns)
    clock = set_clock(monkeypatch)
    with logger.progress(4000, "training") as bar:
        bar.skip(1230)
        clock[0] += 4
        bar.update(1238, **METRICS)
    lines = screen_lines(terminal)
    assert max(map(len, lines)) <= columns
    assert re.fullmatch(pattern, lines[-1]), lines[-1]


def test_progress_of_a_resumed_run_says_nothing_of_the_earlier_one(logger, monkeypatch):
    """The time left is that of the steps since the resume."""
    terminal = open_terminal(monkeypatch, columns=80)
    clock = set_clock(monkeypatch)
    with logger.progress(100, "training") as bar:
        clock[0] += 1000
        bar.skip(60)
        assert bar.line() == "training 60/100"
        clock[0] += 10
        bar.advance()
        assert bar.line() == "training 61/100  about 6 min left"
    assert "training 61/100" in screen_lines(terminal)[-1]


def test_rich_is_imported_only_on_a_terminal(logger, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    with logger.progress(2, "training") as bar:
        bar.update(1)
    logger.table("try", ["a"], [["b"]])
    assert "training 1/2" in capsys.readouterr().out


def test_numbers_and_durations_are_short():
    numbers = {0: "0", 1234567: "1,234,567", 12345.6: "12,346", -1234.5: "-1,234"}
    numbers |= {2.51234: "2.512", 0.00002: "2e-05", float("inf"): "inf"}
    assert {value: format_number(value) for value in numbers} == numbers
    assert (format_number(0.0), format_number(float("nan"))) == ("0", "nan")
    durations = {45: "45 s", 720: "12 min", 12600: "3.5 h", 800000: "9 days"}
    assert {value: format_duration(value) for value in durations} == durations
