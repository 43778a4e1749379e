"""Runs that train LoRA on a model that two processes hold together."""

import mlx.core as mx
import pytest
from processes import in_ring
from small_base import BASE
from test_distributed_runs import MAIN
from tiny_runs import SIGNAL_ONE_RANK, TRAIN, Run

LORA = {"type": "lora", "rank": 4, "dropout": 0.2}
# AdamW makes a full step even from a gradient that is only rounding error.
STEPS = {"adapter": LORA, "optimizer": "sgd", "learning_rate": 3e-2}
STEPS |= {"load_best_at_end": True}
STAGES = ({"train": TRAIN | STEPS},)
PACKED = STEPS | {"packing": True, "gradient_accumulation_steps": 2, "batch_size": 3}
QUANTIZED = ({"quantize": {"bits": 4, "group_size": 32}}, {"train": TRAIN | PACKED})


def make_run(folder, stages=STAGES) -> Run:
    folder.mkdir(exist_ok=True)
    return Run(folder, *stages, model=BASE)


def run_together(run: Run, *signal: str) -> list:
    """Run in two processes; `signal` = rank, name, place and turn."""
    program = SIGNAL_ONE_RANK if signal else MAIN
    arguments = *signal, *run.arguments("parallel.tensor=2")
    return in_ring(program, *arguments, folder=run.folder)


def assert_same(run: Run, expected: Run) -> None:
    """The records of all steps, and the adapter."""
    for record, other in zip(run.records(), expected.records(), strict=True):
        assert record.keys() == other.keys()
        for key, value in other.items():
            is_number = isinstance(value, float)
            wanted = pytest.approx(value, rel=1e-5) if is_number else value
            assert record[key] == wanted, (record["step"], key)
    file = "adapters/adapters.safetensors"
    ours, others = (mx.load(str(each.output / file)) for each in (run, expected))
    assert ours.keys() == others.keys()
    for name, value in others.items():
        error = mx.abs(ours[name] - value).max() / mx.abs(value).max()
        assert error.item() <= 1e-5, name


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run in one process."""
    run = make_run(tmp_path_factory.mktemp("plain"))
    assert run() == 0
    return run


def test_one_process_resumes_what_two_began(tmp_path, plain):
    run = make_run(tmp_path)
    processes = run_together(run, "1", "SIGINT", "step", "7")
    assert [p.returncode for p in processes] == [130, 130], processes[0].stderr
    assert "2 processes over ring; 2 hold a model together" in run.log
    assert run() == 0
    assert "resuming after step" in run.log
    assert_same(run, plain)


@pytest.mark.slow
def test_two_processes_resume_what_one_began(tmp_path, plain):
    run = make_run(tmp_path)
    assert run.run_with_signal("SIGINT", "step", 7).returncode == 130
    processes = run_together(run)
    assert [p.returncode for p in processes] == [0, 0], processes[0].stderr
    assert "resuming after step" in run.log
    assert_same(run, plain)
    assert_same_model(run, plain, "1-train")


@pytest.mark.slow
def test_a_quantized_base_and_packed_batches(tmp_path):
    runs = [make_run(tmp_path / name, QUANTIZED) for name in ("plain", "divided")]
    assert runs[0]() == 0
    assert [process.returncode for process in run_together(runs[1])] == [0, 0]
    assert_same(*runs)
    assert_same_model(*runs, "2-train")


def assert_same_model(run: Run, expected: Run, stage: str) -> None:
    """The fused models, up to the last bit of float16, and what was measured."""
    file = f"stages/{stage}/dense/model.safetensors"
    ours, others = (mx.load(str(each.output / file)) for each in (run, expected))
    assert ours.keys() == others.keys()
    for name, value in others.items():
        assert mx.allclose(ours[name], value, rtol=2e-3, atol=1e-6), name
    facts, other = (
        each.json("manifest.json")["stages"][stage]["result"]["facts"]
        for each in (run, expected)
    )
    assert facts["improvement"] == pytest.approx(other["improvement"], rel=1e-4)
