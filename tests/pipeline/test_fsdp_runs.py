"""Runs whose processes keep shares, through the command line."""

import json

import mlx.core as mx
import pytest
from processes import SCATTER, in_ring
from test_distributed_runs import ATTACK, MAIN, assert_close
from tiny_runs import TRAIN, VALIDATE, Run

STAGES = (
    {
        "train": TRAIN
        | {"fsdp": True, "gradient_checkpointing": True, "load_best_at_end": True}
        | {"sample_prompts": ["Add 1 and 1."], "packing": True}
    },
    {"evaluate": VALIDATE},
)


def make_run(folder, *stages):
    folder.mkdir(exist_ok=True)
    return Run(folder, *(stages or STAGES))


def both(run, program=SCATTER + MAIN, *more):
    return in_ring(program, *run.arguments(*more), folder=run.folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """One process without shares; the others find what it has compiled."""
    train = {k: v for k, v in STAGES[0]["train"].items() if k != "fsdp"}
    run = make_run(tmp_path_factory.mktemp("plain"), {"train": train}, STAGES[1])
    assert run() == 0
    return run


@pytest.fixture(scope="module")
def expected(tmp_path_factory, plain):
    run = make_run(tmp_path_factory.mktemp("undisturbed"))
    ended = both(run)
    assert [done.returncode for done in ended] == [0, 0], ended[0].stderr
    assert ended[1].stdout == ended[1].stderr == ""
    assert "every process keeps 50% of the trained weights" in ended[0].stdout
    return run


def weights(run) -> dict[str, mx.array]:
    return mx.load(str(run.output / "stages/1-train/dense/model.safetensors"))


def test_fsdp_matches_one_process(plain, expected):
    found = [[r for r in run.rows() if "loss" in r] for run in (expected, plain)]
    assert_close(*found)
    mine, others = weights(expected), weights(plain)
    assert mine.keys() == others.keys()
    for name, value in others.items():
        assert mine[name].dtype == value.dtype
        off = mx.abs(mine[name].astype(mx.float32) - value.astype(mx.float32))
        assert off.mean().item() < 1e-5, name
    facts = [run.json("manifest.json")["stages"] for run in (expected, plain)]
    counts = [json.dumps(fact).partition("trained_parameters")[2] for fact in facts]
    assert counts[0][:10] == counts[1][:10] != ""
    assert len(expected.rows("samples.jsonl")) == 4


@pytest.mark.parametrize(("rank", "kind"), [(0, "SIGINT"), (1, "SIGTERM")])
def test_fsdp_resumes_exactly(tmp_path, expected, rank, kind):
    run = make_run(tmp_path)
    attack = [str(rank), kind, "step", "7", *run.arguments()]
    ended = in_ring(SCATTER + ATTACK, *attack, folder=tmp_path)
    assert [done.returncode for done in ended] == [130, 130], ended[0].stderr
    assert "stopped after step" in ended[0].stderr
    assert [done.returncode for done in both(run)] == [0, 0]
    assert "resuming after step" in run.log
    assert run.outcome() == expected.outcome()


def test_fsdp_over_ring_is_refused(tmp_path):
    run = make_run(tmp_path)
    for done in both(run, MAIN):
        assert done.returncode == 2
        assert "this backend (ring) has no reduce-scatter" in done.stderr
        assert "use NCCL or JACCL, or remove fsdp" in done.stderr
        assert "Traceback" not in done.stderr
    assert not run.output.exists()


def test_fsdp_in_one_process_is_refused(tmp_path, capsys):
    run = make_run(tmp_path)
    assert run() == 2
    told = capsys.readouterr().err
    assert "fsdp needs several processes" in told
    assert "mlx.launch" in told
    assert not run.output.exists()
