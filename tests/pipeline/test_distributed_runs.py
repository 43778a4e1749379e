"""Runs of two processes: rank 0 writes; both stop, fail and resume together."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lmx import launcher
from lmx.cli import main
from processes import free_ports, hostfile, in_ring
from small_base import write_small_base
from tiny_runs import (
    EVALUATE,
    SIGNAL_ONE_RANK,
    TRAIN,
    Run,
    negate,
    resume_command,
    write_examples,
)

BIN = Path(sys.executable).parent
MAIN = "import sys; from lmx.cli.main import train; sys.exit(train())"
LORA = {"type": "lora", "rank": 4, "dropout": 0.2}
SECOND = {"adapter": LORA, "gradient_accumulation_steps": 2, "batch_size": 3}
SECOND |= {"steps": 6, "packing": True, "load_best_at_end": True}
SECOND |= {"sample_prompts": ["Add 1 and 1."]}
STAGES = ({"train": TRAIN}, {"train": TRAIN | SECOND})


def make_run(folder, *stages):
    folder.mkdir(exist_ok=True)
    return Run(folder, *(stages or STAGES))


def run_both_ranks(run, *overrides):
    return in_ring(MAIN, *run.arguments(*overrides), folder=run.folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The same run in one process."""
    run = make_run(tmp_path_factory.mktemp("plain"))
    assert run() == 0
    return run


@pytest.fixture(scope="module")
def expected(tmp_path_factory, plain):
    """An undisturbed run of two processes, and the processes with their output.

    It depends on `plain`, whose compiled kernels both processes reuse.
    """
    run = make_run(tmp_path_factory.mktemp("undisturbed"))
    processes = run_both_ranks(run)
    assert [process.returncode for process in processes] == [0, 0], processes[0].stderr
    return run, processes


def test_only_rank_0_logs(expected):
    run, (first, second) = expected
    assert "2 processes over ring; each trains on 1/2 of every batch" in first.stdout
    assert second.stdout == second.stderr == ""
    assert run.json("manifest.json")["status"] == "done"
    steps = [record["step"] for record in run.records() if record["stage"] == "1-train"]
    assert steps.count(1) == steps.count(0) == 1


def assert_close(records: list[dict], expected: list[dict]) -> None:
    for record, other in zip(records, expected, strict=True):
        assert record["step"] == other["step"]
        floats = [
            [v for v in r.values() if isinstance(v, float)] for r in (record, other)
        ]
        assert floats[0] == pytest.approx(floats[1], rel=1e-4)


def test_distributed_training_matches_one_process(plain, expected):
    # In the second stage dropout depends on the rank.
    assert_close(*(first_stage_records(run) for run in (expected[0], plain)))


def first_stage_records(run) -> list[dict]:
    return [record for record in run.records() if record["stage"] == "1-train"]


def test_signal_to_one_rank_stops_all(tmp_path, expected):
    run = make_run(tmp_path)
    # Step 4 of the second train stage.
    arguments = ["1", "SIGINT", "step", "16", *run.arguments()]
    first, second = in_ring(SIGNAL_ONE_RANK, *arguments, folder=tmp_path)
    assert (first.returncode, second.returncode) == (130, 130), first.stderr
    assert "stopped after step" in first.stderr
    assert second.stderr == ""
    assert run.json("manifest.json")["status"] == "interrupted"
    assert resume_command(first.stderr) == run.arguments()
    assert [process.returncode for process in run_both_ranks(run)] == [0, 0]
    assert "stage 1-train: already complete, skipping" in run.log
    assert "resuming after step" in run.log
    assert run.outcome() == expected[0].outcome()


def test_one_process_resumes_a_distributed_run(tmp_path, expected):
    run = make_run(tmp_path, STAGES[0])
    processes = in_ring(
        SIGNAL_ONE_RANK, "1", "SIGINT", "step", "7", *run.arguments(), folder=tmp_path
    )
    assert [process.returncode for process in processes] == [130, 130]
    assert run() == 0
    assert_close(run.records(), first_stage_records(expected[0]))


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_death_of_one_rank_ends_the_others(tmp_path, expected, rank):
    run = make_run(tmp_path)
    arguments = [str(rank), "SIGKILL", "step", "9", *run.arguments()]
    processes = in_ring(SIGNAL_ONE_RANK, *arguments, folder=tmp_path)
    assert processes[rank].returncode == -signal.SIGKILL
    assert processes[1 - rank].returncode == 1
    assert f"process {rank} ended; the others end too" in processes[1 - rank].stderr
    assert run.json("manifest.json")["status"] == ("running", "failed")[rank]
    if rank == 0:
        assert [process.returncode for process in run_both_ranks(run)] == [0, 0]
        assert run.outcome() == expected[0].outcome()


def test_nan_loss_stops_all_ranks(tmp_path):
    run = make_run(tmp_path, {"train": TRAIN | {"learning_rate": 4e9}})
    first, second = run_both_ranks(run)
    assert (first.returncode, second.returncode) == (1, 1)
    assert "NaN or infinite at step" in first.stderr
    assert second.stderr == ""
    record = run.json("stages/1-train/nan_batch.json")
    assert len(record["tokens"]) == TRAIN["batch_size"]


@pytest.mark.slow
def test_error_of_rank_0_ends_all_ranks(tmp_path):
    run = make_run(tmp_path, {"train": TRAIN | {"steps": 1}}, {"evaluate": EVALUATE})
    run.stages[1]["evaluate"] = EVALUATE | {"thresholds": {"max_perplexity": 0.5}}
    run.write()
    first, second = run_both_ranks(run)
    assert (first.returncode, second.returncode) == (1, 1)
    assert "perplexity" in first.stderr
    assert second.stderr == ""
    # Before any stage: the folder belongs to another run.
    first, second = run_both_ranks(run, "seed=1")
    assert (first.returncode, second.returncode) == (2, 2)
    assert "another recipe" in first.stderr
    assert second.stderr == ""


@pytest.mark.slow
def test_ranks_must_see_the_run_directory(tmp_path):
    run = make_run(tmp_path)
    elsewhere = ON_RANK_1 + '    sys.argv[2] += "-elsewhere"\n' + MAIN
    first, second = in_ring(elsewhere, *run.arguments(), folder=tmp_path)
    assert (first.returncode, second.returncode) == (2, 2)
    assert "this machine does not see" in second.stderr
    assert "output=..." in second.stderr
    assert not Path(f"{run.output}-elsewhere").exists()


ON_RANK_1 = """
import os, sys
if os.environ["MLX_RANK"] == "1":
"""
# Of a folder that the run has made.
OTHER_MODEL = """
    from lmx.pipeline import runner
    runner.weights_digest = lambda folder: "another"
"""
ELSEWHERE = '    os.chdir("elsewhere")\n'
OTHER_VERSION = """
    from lmx.run import distributed
    distributed.version = lambda name: "0.0"
"""


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ('    sys.argv.append("seed=1")\n', "runs another recipe than"),
        (OTHER_VERSION, "has other versions of lmx-toolkit, mlx, mlx-lm than"),
        (OTHER_MODEL, "has another current model and another current reference than"),
    ],
)
def test_ranks_must_have_the_same_recipe_and_model(tmp_path, difference, message):
    run = make_run(tmp_path, *[{"train": TRAIN | {"steps": 1}}] * 2)
    first, second = in_ring(
        ON_RANK_1 + difference + MAIN, *run.arguments(), folder=tmp_path
    )
    assert (first.returncode, second.returncode) == (2, 2)
    said = first.stderr + second.stderr
    assert said.count(f"process 1 {message} the first one") == 1


def test_ranks_must_have_the_same_files(tmp_path, monkeypatch):
    """Each relative path is another file in the other folder; three are different."""
    run = make_run(tmp_path, {"train": TRAIN | {"teacher": {"model": "teacher"}}})
    write_small_base(tmp_path / "base")
    shutil.copytree(tmp_path / "base", tmp_path / "teacher")
    negate(tmp_path / "teacher")
    elsewhere = shutil.copytree(tmp_path, tmp_path / "elsewhere")
    for name in ("base", "teacher"):
        negate(elsewhere / name)
    write_examples(elsewhere / "train.jsonl", 1, 10)
    monkeypatch.chdir(tmp_path)
    run.model, run.data["train"], run.data["valid"] = (
        "base",
        "train.jsonl",
        "valid.jsonl",
    )
    run.write()
    first, second = in_ring(
        ON_RANK_1 + ELSEWHERE + MAIN, *run.arguments(), folder=tmp_path
    )
    assert (first.returncode, second.returncode) == (2, 2)
    [line] = [x for x in second.stderr.splitlines() if "process 1 has another " in x]
    assert "than the first one" in line
    for name in ("data.train (train.jsonl)", "model (base)", "teacher.model (teacher)"):
        assert f"another {name} " in line
    assert "data.valid" not in line
    assert not (run.output / "stages").exists()


# Rank 1 hangs. Rank 0 gets SIGTERM while it waits for rank 1.
HANG = """
import os, signal, threading
from lmx.pipeline import context
from lmx.training.step import TrainStep

context.SHUTDOWN_SECONDS = 0.5
rank, call, calls = os.environ["MLX_RANK"], TrainStep.__call__, []

def hang(*arguments):
    calls.append(1)
    if len(calls) == 7:
        if rank == "1":
            signal.pause()
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    return call(*arguments)

TrainStep.__call__ = hang
"""


@pytest.mark.slow
def test_rank_that_waits_for_a_hanging_rank_can_be_ended(tmp_path):
    run = make_run(tmp_path, {"train": TRAIN})
    first, second = in_ring(HANG + MAIN, *run.arguments(), folder=tmp_path)
    assert (first.returncode, second.returncode) == (130, 130), first.stderr
    assert second.stderr == ""
    assert run.json("manifest.json")["status"] == "interrupted"
    assert run() == 0
    assert "resuming after step 6" in run.log


STOPPED = """
from lmx.run import watchdog

watchdog.BEAT_SECONDS, watchdog.SILENCE_SECONDS, watchdog.GRACE_SECONDS = 0.2, 1.5, 1
"""
STOP = """
    import signal, subprocess
    from lmx.training.step import TrainStep
    call, calls = TrainStep.__call__, []

    def stop(*arguments):
        calls.append(1)
        if len(calls) == 7:
            subprocess.Popen(["sh", "-c", f"sleep 8; kill -KILL {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        return call(*arguments)

    TrainStep.__call__ = stop
"""


@pytest.mark.slow
def test_run_with_a_stopped_rank_has_failed(tmp_path):
    run = make_run(tmp_path, {"train": TRAIN})
    first, _ = in_ring(
        STOPPED + ON_RANK_1 + STOP + MAIN, *run.arguments(), folder=tmp_path
    )
    assert first.returncode == 1
    assert "process 1 has been silent" in first.stderr
    manifest = run.json("manifest.json")
    assert manifest["status"] == "failed"
    assert manifest["ended"]


@pytest.mark.slow
def test_run_under_mlx_launch(tmp_path, expected):
    run = make_run(tmp_path)
    port = str(min(free_ports(3)))
    command = [BIN / "mlx.launch", "-n", "2", "--backend", "ring", "-p", port, "--"]
    with subprocess.Popen(
        [*command, BIN / "lmx-train", *run.arguments()],
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        # Left open, because mlx.launch reads from it while it runs.
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        output = process.stdout.read()
    assert output.count("2 processes over ring") == 1
    assert run.outcome() == expected[0].outcome()


@pytest.fixture
def second_of_two(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_RANK", "1")
    monkeypatch.setenv("MLX_HOSTFILE", str(hostfile(tmp_path)))


@pytest.mark.parametrize("arguments", [["--dry-run", "tiny"], ["--list"]])
def test_only_rank_0_runs_dry_run_and_list(second_of_two, capsys, arguments):
    assert main.train(arguments) == 0
    assert capsys.readouterr() == ("", "")


NCCL = {"MLX_RANK": "1", "NCCL_HOST_IP": "10.0.0.1", "MLX_WORLD_SIZE": "4"}
JACCL = {"MLX_RANK": "0", "MLX_JACCL_COORDINATOR": "a:1"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HOSTS = '[["10.0.0.1:1"], ["10.0.0.2:1"], ["10.0.0.2:2"]]'


@pytest.mark.parametrize(
    ("environment", "text", "rank", "backend", "local_processes", "processes"),
    [
        ({}, "", None, None, 1, 1),
        ({"MLX_RANK": "0"}, "", None, None, 1, 1),
        ({"MLX_RANK": "0", "MLX_HOSTFILE": "file"}, "\n", None, None, 1, 1),
        ({"MLX_RANK": "0", "MLX_HOSTFILE": "file"}, HOSTS, 0, "ring", 1, 3),
        ({"MLX_RANK": "2", "MLX_HOSTFILE": "file"}, HOSTS, 2, "ring", 2, 3),
        (NCCL, "", 1, "nccl", 1, 4),
        (JACCL, "", 0, "jaccl", 1, 1),
        (
            JACCL | {"MLX_IBV_DEVICES": "file"},
            '[[null, "rdma_a"], ["rdma_b", null]]',
            0,
            "jaccl",
            1,
            2,
        ),
        (MPI, "", 3, "mpi", 2, 4),
    ],
)
def test_launcher_reads_the_environment_before_it_connects(
    tmp_path,
    monkeypatch,
    environment,
    text,
    rank,
    backend,
    local_processes,
    processes,
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text(text)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launcher.launched_rank() == rank
    assert launcher.local_process_count() == local_processes
    assert launcher.process_count() == processes
    if backend:
        assert launcher.backend() == backend
