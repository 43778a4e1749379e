"""Runs of two processes: one writes, and they stop, fail and go on together."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lmx.cli import main
from lmx.run import launcher
from processes import free_ports, hostfile, in_ring
from tiny_runs import ASSASSIN, TRAIN, VALIDATE, Run, resume_command, write_rows

BIN = Path(sys.executable).parent
MAIN = "import sys; from lmx.cli.main import train; sys.exit(train())"
# One of the processes is sent a signal, the other one is not.
ATTACK = (
    """
import os, sys
arguments = sys.argv[1:]
if os.environ["MLX_RANK"] != arguments.pop(0):
    arguments[1:3] = ["step", "1000000"]
sys.argv[1:] = arguments
"""
    + ASSASSIN
)
LORA = {"type": "lora", "rank": 4, "dropout": 0.2}
TWICE = (
    {"train": TRAIN},
    {
        "train": TRAIN
        | {
            "adapter": LORA,
            "gradient_accumulation_steps": 2,
            "batch_size": 3,
            "steps": 6,
        }
        | {
            "packing": True,
            "load_best_at_end": True,
            "sample_prompts": ["Add 1 and 1."],
        }
    },
)


def make_run(folder, *stages):
    folder.mkdir(exist_ok=True)
    return Run(folder, *(stages or TWICE))


def both(run, *more):
    return in_ring(MAIN, *run.arguments(*more), folder=run.folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The same in one process."""
    run = make_run(tmp_path_factory.mktemp("plain"))
    assert run() == 0
    return run


@pytest.fixture(scope="module")
def expected(tmp_path_factory, plain):
    """The outcome of two processes that nothing disturbs, and what they said.

    They find what the one has compiled, which else each of them would.
    """
    run = make_run(tmp_path_factory.mktemp("undisturbed"))
    ended = both(run)
    assert [done.returncode for done in ended] == [0, 0], ended[0].stderr
    return run, ended


def test_only_rank_0_logs(expected):
    run, (first, second) = expected
    assert "2 processes over ring; each trains on 1/2 of every batch" in first.stdout
    assert second.stdout == second.stderr == ""
    assert run.json("manifest.json")["status"] == "done"
    steps = [row["step"] for row in run.rows() if row["stage"] == "1-train"]
    assert steps.count(1) == steps.count(0) == 1


def assert_close(found: list[dict], expected: list[dict]) -> None:
    for rows in (found, expected):
        assert [row["step"] for row in rows] == [row["step"] for row in expected]
    figures = [[v for v in row.values() if isinstance(v, float)] for row in expected]
    for row, numbers in zip(found, figures, strict=True):
        mine = [value for value in row.values() if isinstance(value, float)]
        assert mine == pytest.approx(numbers, rel=1e-4)


def test_distributed_training_matches_one_process(plain, expected):
    # In the other stage dropout draws by process.
    assert_close(*(of_first_stage(run) for run in (expected[0], plain)))


def of_first_stage(run) -> list[dict]:
    return [row for row in run.rows() if row["stage"] == "1-train"]


@pytest.mark.parametrize(("rank", "kind"), [(0, "SIGTERM"), (1, "SIGINT")])
def test_signal_to_one_rank_stops_all(tmp_path, expected, rank, kind):
    run = make_run(tmp_path)
    # The second training's fourth step.
    attack = [str(rank), kind, "step", "16", *run.arguments()]
    first, second = in_ring(ATTACK, *attack, folder=tmp_path)
    assert (first.returncode, second.returncode) == (130, 130), first.stderr
    assert "stopped after step" in first.stderr
    assert second.stderr == ""
    assert run.json("manifest.json")["status"] == "interrupted"
    assert resume_command(first.stderr) == run.arguments()
    assert [done.returncode for done in both(run)] == [0, 0]
    assert "stage 1-train: already complete, skipping" in run.log
    assert "resuming after step" in run.log
    assert run.outcome() == expected[0].outcome()


def test_one_process_resumes_a_distributed_run(tmp_path, expected):
    run = make_run(tmp_path, TWICE[0])
    stopped = in_ring(
        ATTACK, "1", "SIGINT", "step", "7", *run.arguments(), folder=tmp_path
    )
    assert [done.returncode for done in stopped] == [130, 130]
    assert run() == 0
    assert_close(run.rows(), of_first_stage(expected[0]))


@pytest.mark.parametrize("rank", [0, 1])
def test_death_of_one_rank_ends_the_others(tmp_path, expected, rank):
    run = make_run(tmp_path)
    attack = [str(rank), "SIGKILL", "step", "9", *run.arguments()]
    ended = in_ring(ATTACK, *attack, folder=tmp_path)
    assert ended[rank].returncode == -signal.SIGKILL
    assert ended[1 - rank].returncode == 1
    assert "lost the connection to another process" in ended[1 - rank].stderr
    assert run.json("manifest.json")["status"] == ("running", "failed")[rank]
    if rank == 0:
        assert [done.returncode for done in both(run)] == [0, 0]
        assert run.outcome() == expected[0].outcome()


def test_nan_loss_stops_all_ranks(tmp_path):
    run = make_run(tmp_path, {"train": TRAIN | {"learning_rate": 1e38}})
    first, second = both(run)
    assert (first.returncode, second.returncode) == (1, 1)
    assert "NaN or infinite at step" in first.stderr
    assert second.stderr == ""
    record = run.json("stages/1-train/nan_batch.json")
    assert len(record["tokens"]) == TRAIN["batch_size"]


def test_error_of_rank_0_ends_all_ranks(tmp_path):
    run = make_run(tmp_path, {"train": TRAIN | {"steps": 1}}, {"evaluate": VALIDATE})
    run.stages[1]["evaluate"] = VALIDATE | {"thresholds": {"max_perplexity": 0.5}}
    run.write()
    first, second = both(run)
    assert (first.returncode, second.returncode) == (1, 1)
    assert "perplexity" in first.stderr
    assert second.stderr == ""
    # And before any stage: the folder is another run's.
    first, second = both(run, "seed=1")
    assert (first.returncode, second.returncode) == (2, 2)
    assert "another recipe" in first.stderr
    assert second.stderr == ""


def test_ranks_must_see_the_run_directory(tmp_path):
    run = make_run(tmp_path)
    elsewhere = (
        """
import os, sys
if os.environ["MLX_RANK"] == "1":
    sys.argv[2] += "-elsewhere"
"""
        + MAIN
    )
    first, second = in_ring(elsewhere, *run.arguments(), folder=tmp_path)
    assert (first.returncode, second.returncode) == (2, 2)
    assert "this machine does not see" in second.stderr
    assert "output=..." in second.stderr
    assert not Path(f"{run.output}-elsewhere").exists()


OTHER_ROWS = """
import os
if os.environ["MLX_RANK"] == "1":
    os.chdir("elsewhere")
"""
OTHER_MODEL = """
import os
from lmx.pipeline.train_run import TrainRun
attach = TrainRun._attach_adapter

def other(self):
    weights = self.base_weights.items()
    self.base_weights = {name: -value for name, value in weights}
    return attach(self)

if os.environ["MLX_RANK"] == "1":
    TrainRun._attach_adapter = other
"""
OTHER_RECIPE = """
import os, sys
if os.environ["MLX_RANK"] == "1":
    sys.argv.append("seed=1")
"""


@pytest.mark.parametrize(
    ("difference", "told"),
    [
        (OTHER_ROWS, "reads other examples than"),
        (OTHER_RECIPE, "runs another recipe than"),
        (OTHER_MODEL, "begins with another model than"),
    ],
)
def test_ranks_must_have_the_same_recipe_and_model(
    tmp_path, monkeypatch, difference, told
):
    run = make_run(tmp_path, {"train": TRAIN})
    # A name that means another file elsewhere.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    write_rows(tmp_path / "elsewhere" / "train.jsonl", 1, 40)
    run.data["train"] = ["train.jsonl"]
    run.write()
    first, second = in_ring(difference + MAIN, *run.arguments(), folder=tmp_path)
    assert (first.returncode, second.returncode) == (2, 2)
    assert f"process 1 {told} the first one" in second.stderr


# The second one hangs, and the first one is told to end while it waits for it.
HANG = """
import os, signal, threading
from lmx.training import trainer
from lmx.training.step import TrainStep

trainer.SHUTDOWN_SECONDS = 0.5
rank, call, calls = os.environ["MLX_RANK"], TrainStep.__call__, []

def hang(*arguments):
    calls.append(1)
    if len(calls) == 7:
        if rank == "1":
            # The first one has left by then.
            signal.signal(signal.SIGALRM, lambda *_: os._exit(5))
            signal.alarm(5)
            signal.pause()
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    return call(*arguments)

TrainStep.__call__ = hang
"""


def test_rank_that_waits_for_a_hanging_rank_can_be_ended(tmp_path):
    run = make_run(tmp_path, {"train": TRAIN})
    first, second = in_ring(HANG + MAIN, *run.arguments(), folder=tmp_path)
    assert first.returncode == 130
    assert second.returncode == 5
    assert run() == 0
    assert "resuming after step 6" in run.log


def test_run_under_mlx_launch(tmp_path, expected):
    run = make_run(tmp_path)
    port = str(min(free_ports(3)))
    command = [BIN / "mlx.launch", "-n", "2", "--backend", "ring", "-p", port, "--"]
    with subprocess.Popen(
        [*command, BIN / "lmx-train", *run.arguments()],
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        # Left open: mlx.launch reads from it as long as it runs.
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        told = process.stdout.read()
    assert told.count("2 processes over ring") == 1
    assert run.outcome() == expected[0].outcome()


@pytest.fixture
def second_of_two(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_RANK", "1")
    monkeypatch.setenv("MLX_HOSTFILE", str(hostfile(tmp_path)))


@pytest.mark.parametrize("arguments", [["--dry-run", "tiny"], ["--list"]])
def test_only_rank_0_runs_dry_run_and_list(second_of_two, capsys, arguments):
    assert main.train(arguments) == 0
    assert capsys.readouterr() == ("", "")


class TestLauncher:
    """What is known before anything is connected."""

    def test_alone(self, monkeypatch):
        assert (launcher.launched_rank(), launcher.local_process_count()) == (None, 1)
        monkeypatch.setenv("MLX_RANK", "0")
        assert launcher.launched_rank() is None

    def test_one_process_has_an_empty_list(self, tmp_path, monkeypatch):
        (tmp_path / "hosts").write_text("\n")
        monkeypatch.setenv("MLX_RANK", "0")
        monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "hosts"))
        assert (launcher.launched_rank(), launcher.local_process_count()) == (None, 1)

    @pytest.mark.parametrize(
        ("said", "rank", "backend", "neighbours", "processes"),
        [
            (
                {"MLX_RANK": "1", "NCCL_HOST_IP": "10.0.0.1", "MLX_WORLD_SIZE": "4"},
                1,
                "nccl",
                1,
                4,
            ),
            ({"MLX_RANK": "0", "MLX_JACCL_COORDINATOR": "a:1"}, 0, "jaccl", 1, 1),
            (
                {
                    "OMPI_COMM_WORLD_RANK": "3",
                    "OMPI_COMM_WORLD_SIZE": "4",
                    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                },
                3,
                "mpi",
                2,
                4,
            ),
        ],
    )
    def test_ways_of_connecting(
        self, monkeypatch, said, rank, backend, neighbours, processes
    ):
        for name, value in said.items():
            monkeypatch.setenv(name, value)
        assert launcher.launched_rank() == rank
        assert launcher.backend() == backend
        assert launcher.local_process_count() == neighbours
        assert launcher.process_count() == processes

    def test_jaccl_lists_the_devices_of_all(self, tmp_path, monkeypatch):
        (tmp_path / "devices").write_text('[[null, "rdma_a"], ["rdma_b", null]]')
        monkeypatch.setenv("MLX_RANK", "0")
        monkeypatch.setenv("MLX_JACCL_COORDINATOR", "a:1")
        monkeypatch.setenv("MLX_IBV_DEVICES", str(tmp_path / "devices"))
        assert launcher.process_count() == 2

    def test_neighbours_share_a_machine(self, tmp_path, monkeypatch):
        hosts = tmp_path / "hosts"
        hosts.write_text('[["10.0.0.1:1"], ["10.0.0.2:1"], ["10.0.0.2:2"]]')
        monkeypatch.setenv("MLX_HOSTFILE", str(hosts))
        for rank, count in enumerate([1, 2, 2]):
            monkeypatch.setenv("MLX_RANK", str(rank))
            assert launcher.local_process_count() == count
            assert launcher.process_count() == 3
