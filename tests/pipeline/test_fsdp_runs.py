"""FSDP runs from the command line."""

import json

import mlx.core as mx
import pytest
from processes import SCATTER, in_ring
from test_distributed_runs import MAIN, SIGNAL_ONE_RANK, assert_close
from tiny_runs import EVALUATE, TRAIN, Run

STAGES = (
    {
        "train": TRAIN
        | {"fsdp": True, "gradient_checkpointing": True, "load_best_at_end": True}
        | {"sample_prompts": ["Add 1 and 1."], "packing": True}
    },
    {"evaluate": EVALUATE},
)


def make_run(folder, *stages):
    folder.mkdir(exist_ok=True)
    return Run(folder, *(stages or STAGES))


def run_both_ranks(run, program=SCATTER + MAIN, *overrides):
    return in_ring(program, *run.arguments(*overrides), folder=run.folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """One process without FSDP. The other runs reuse its compiled kernels."""
    train = {k: v for k, v in STAGES[0]["train"].items() if k != "fsdp"}
    run = make_run(tmp_path_factory.mktemp("plain"), {"train": train}, STAGES[1])
    assert run() == 0
    return run


@pytest.fixture(scope="module")
def expected(tmp_path_factory, plain):
    run = make_run(tmp_path_factory.mktemp("undisturbed"))
    processes = run_both_ranks(run)
    assert [process.returncode for process in processes] == [0, 0], processes[0].stderr
    assert processes[1].stdout == processes[1].stderr == ""
    assert "every process keeps 50% of the trained weights" in processes[0].stdout
    return run


def load_weights(run) -> dict[str, mx.array]:
    return mx.load(str(run.output / "stages/1-train/dense/model.safetensors"))


def test_fsdp_matches_one_process(plain, expected):
    records = [[r for r in run.records() if "loss" in r] for run in (expected, plain)]
    assert_close(*records)
    sharded, reference = load_weights(expected), load_weights(plain)
    assert sharded.keys() == reference.keys()
    for name, value in reference.items():
        assert sharded[name].dtype == value.dtype
        error = mx.abs(sharded[name].astype(mx.float32) - value.astype(mx.float32))
        assert error.mean().item() < 1e-5, name
    stage_facts = [run.json("manifest.json")["stages"] for run in (expected, plain)]
    counts = [
        json.dumps(stage).partition("trained_parameters")[2] for stage in stage_facts
    ]
    assert counts[0][:10] == counts[1][:10] != ""
    assert len(expected.records("samples.jsonl")) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "signal_name"), [(0, "SIGINT"), (1, "SIGTERM")])
def test_fsdp_resumes_exactly(tmp_path, expected, rank, signal_name):
    run = make_run(tmp_path)
    arguments = [str(rank), signal_name, "step", "7", *run.arguments()]
    processes = in_ring(SCATTER + SIGNAL_ONE_RANK, *arguments, folder=tmp_path)
    assert [p.returncode for p in processes] == [130, 130], processes[0].stderr
    assert "stopped after step" in processes[0].stderr
    assert [process.returncode for process in run_both_ranks(run)] == [0, 0]
    assert "resuming after step" in run.log
    assert run.outcome() == expected.outcome()


def test_fsdp_without_reduce_scatter_is_refused(tmp_path, capsys):
    run = make_run(tmp_path)
    processes = run_both_ranks(run, MAIN)
    assert [process.returncode for process in processes] == [2, 2]
    printed = "".join(process.stderr for process in processes)
    assert printed.count("this backend (ring) has no reduce-scatter") == 1
    assert "use NCCL or JACCL, or remove fsdp" in printed
    assert "Traceback" not in printed
    assert run() == 2
    message = capsys.readouterr().err
    assert "fsdp needs several processes" in message
    assert "mlx.launch" in message
    assert not run.output.exists()
