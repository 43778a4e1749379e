"""Evaluation by several processes: the figures of one, each process does its share."""

from pathlib import Path

import pytest
from lmx.cli import main
from mlx.utils import tree_flatten
from processes import WRONG_SHARD, in_ring
from tiny_runs import EVALUATE, Run

DATA = Path(__file__).parents[2] / "data"
MAIN = "import sys; from lmx.cli.main import train; sys.exit(train())"
# Entries that depend on the clock.
TIMED = ("generation", "speculation")
# Only rank 0 may measure what the others wait for.
ALONE = """
import os
from lmx.pipeline.evaluate import metrics

measure = metrics.measure_latency

def measured(*arguments, **settings):
    assert os.environ["MLX_RANK"] == "0"
    return measure(*arguments, **settings)

metrics.measure_latency = measured
"""


def make_run(folder):
    """An evaluation of a model that answers questions in many ways."""
    settings = EVALUATE | {"exact_match": {"samples": 6}, "max_tokens": 24}
    stages = {"quantize": {"bits": 4, "group_size": 32}}, {"evaluate": settings}
    run = Run(folder, *stages, model=DATA / "tiny-base")
    run.data["valid"] = [str(DATA / "skills/test.jsonl")]
    run.write()
    return run


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The report of one process."""
    run = make_run(tmp_path_factory.mktemp("one"))
    assert run() == 0
    return report(run)


def report(run) -> tuple[dict, list]:
    """Numbers of the models by key, and the answers."""
    record = run.json("report.json")
    for figures in record["models"].values():
        for name in TIMED:
            assert figures.pop(name)
    return dict(tree_flatten(record["models"])), record["samples"]


def is_same(measured: tuple[dict, list], expected: tuple[dict, list]) -> bool:
    numbers, answers = measured
    return answers == expected[1] and numbers == pytest.approx(
        expected[0], rel=1e-5, abs=1e-7
    )


@pytest.mark.slow
@pytest.mark.parametrize(("program", "count"), [(ALONE, 3), (WRONG_SHARD, 2)])
def test_processes_share_an_evaluation(tmp_path, expected, program, count):
    run = make_run(tmp_path)
    processes = in_ring(program + MAIN, *run.arguments(), folder=tmp_path, count=count)
    assert [p.returncode for p in processes] == [0] * count, processes[0].stderr
    assert [p.stderr for p in processes[1:]] == [""] * (count - 1)
    assert is_same(report(run), expected) == (program != WRONG_SHARD)


def test_processes_hold_the_evaluated_models_together(tmp_path, expected):
    run = make_run(tmp_path)
    arguments = run.arguments("parallel.tensor=2")
    processes = in_ring(MAIN, *arguments, folder=tmp_path)
    assert [p.returncode for p in processes] == [0, 0], processes[0].stderr
    numbers, answers = expected
    # No process has whole layers.
    numbers = {k: v for k, v in numbers.items() if ".layers." not in k}
    assert is_same(report(run), (numbers, answers))


def test_a_model_that_cannot_be_divided_is_refused_before_the_run(tmp_path, capsys):
    run = make_run(tmp_path)
    assert main.train(["--dry-run", *run.arguments("parallel.tensor=7")]) == 2
    assert "cannot be divided among 7 processes" in capsys.readouterr().err


SIGNALLED = """
import os, signal
from lmx.pipeline.evaluate import metrics

measure = metrics.measure_divergence

def signalled(*arguments):
    if os.environ["MLX_RANK"] == "1":
        os.kill(os.getpid(), signal.{name})
    return measure(*arguments)

metrics.measure_divergence = signalled
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "codes", "status"),
    [("SIGKILL", [1, -9], "failed"), ("SIGINT", [130, 130], "interrupted")],
)
def test_one_process_resumes_what_two_began(tmp_path, expected, name, codes, status):
    run = make_run(tmp_path)
    program = SIGNALLED.format(name=name) + MAIN
    processes = in_ring(program, *run.arguments(), folder=tmp_path)
    assert [p.returncode for p in processes] == codes, processes[0].stderr
    assert run.json("manifest.json")["status"] == status
    assert not (run.output / "report.json").exists()
    assert run() == 0
    assert is_same(report(run), expected)
