"""The benchmarks at sizes where only what they compare matters, not how fast it is."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from lmx import cpu

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TINY = "--hidden 64 --layers 1 --vocabulary 320 --batch 2 --length 32 --steps 2"


def table(case: str) -> tuple[str, dict[str, dict[str, str]]]:
    """What `train_step.py` prints, and its rows by side and column."""
    command = [sys.executable, str(BENCHMARKS / "train_step.py"), *TINY.split()]
    command += ["--rounds", "1", "--threads", "1", "--case", case]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return text, columns(text)


def columns(text: str) -> dict[str, dict[str, str]]:
    """The rows of a table by side and column."""
    split = re.compile(r" {2,}").split
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("side "))
    names, *rows = (split(line) for line in lines[start:] if line)
    return {row[0]: dict(zip(names, row, strict=True)) for row in rows}


def milliseconds(row: dict[str, str]) -> float:
    return float(row["ms/step"].replace(",", ""))


@pytest.mark.parametrize(("case", "trained"), [("full", 73_920), ("lora", 20_480)])
def test_both_sides_do_the_same_work(case, trained):
    text, rows = table(case)
    assert f"{trained:,} parameters trained" in text
    replaced = cpu.enable().blas.path is not None
    assert list(rows) == ["lmx", "mlx-lm"] + ["stock"] * replaced
    ours = rows["lmx"]
    for row in rows.values():
        first, last = float(row["first loss"]), float(row["last loss"])
        assert first == pytest.approx(float(ours["first loss"]), abs=1e-4)
        # That they stay together means something only where training moves the loss.
        assert float(row["most apart"]) < 1e-5 < first - last
        ratio = milliseconds(row) / milliseconds(ours)
        assert float(row["ratio"].rstrip("x")) == pytest.approx(ratio, rel=0.1)
    assert rows["mlx-lm"]["BLAS"] == ours["BLAS"]
    if replaced:
        assert rows["stock"]["BLAS"] == "MLX's own"


@pytest.mark.parametrize("packing", [False, True])
def test_data_are_measured_at_every_size(packing):
    """It asserts itself that the second start finds the rows of the first."""
    command = [
        sys.executable,
        str(BENCHMARKS / "data_scaling.py"),
        "--rows",
        "50",
        "90",
    ]
    command += ["--batch", "4", "--steps", "9"] + ["--packing"] * packing
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    *_, first, second = [line.split() for line in text.splitlines()]
    assert (first[0], second[0]) == ("50", "90")
    for row in (first, second):
        numbers = [float(cell.replace(",", "")) for cell in row]
        assert len(numbers) == 9
        # Rows, rows a second and trained tokens a second.
        assert min(numbers[0], numbers[3], numbers[8]) > 0


def test_fine_tuning_of_the_same_rows_in_as_many_steps():
    command = [sys.executable, str(BENCHMARKS / "finetune.py"), "--case", "chat"]
    command += ["--hidden", "64", "--layers", "1", "--limit", "16"]
    command += ["--vocabulary", "1024"]
    command += ["--rounds", "1", "--threads", "1"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "No --hf-python" in text
    assert "20,480 parameters trained" in text
    rows = columns(text)
    replaced = cpu.enable().blas.path is not None
    assert list(rows) == ["lmx", "mlx-lm"] + ["stock"] * replaced
    ours, theirs = rows["lmx"], rows["mlx-lm"]
    assert int(theirs["steps"]) == 2
    for row in (ours, theirs):
        assert float(row["last loss"]) < float(row["first loss"])
    # Both have the whole epoch behind them, in batches of their own.
    gap = float(ours["last loss"]) - float(theirs["last loss"])
    assert abs(gap) < 0.05 * float(ours["last loss"])


def test_generating_the_same_tokens():
    command = [sys.executable, str(BENCHMARKS / "generate.py"), "--hidden", "64"]
    command += ["--layers", "1", "--vocabulary", "512", "--prompt", "32"]
    command += ["--tokens", "8", "--rows", "3", "--rounds", "1", "--threads", "1"]
    command += ["--sampled", "250"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    cells = [line.split() for line in text.splitlines()]
    for case in ("prefill", "decode", "batch"):
        ours, theirs = (row for row in cells if row[:1] == [case] and "of" not in row)
        assert (ours[1], theirs[1], ours[4]) == ("lmx", "mlx-lm", "1.00x")
    assert "4 of 4 answers are the same" in text
    for guesses in (1, 2, 4):
        (row,) = [r for r in cells if r[:1] == [str(guesses)] and len(r) == 8]
        ours, theirs, _, more, ours_expected, less, theirs_expected = row[1:]
        assert float(more) > 2 * float(less)
        assert float(ours) == pytest.approx(float(ours_expected), rel=0.2)
        assert float(theirs) == pytest.approx(float(theirs_expected), rel=0.2)
