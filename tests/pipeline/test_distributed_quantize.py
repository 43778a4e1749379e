"""Quantize stages of several processes: their models, and kills."""

import signal

import mlx.core as mx
import numpy as np
import pytest
from processes import in_ring
from tiny_runs import SIGNAL_ONE_RANK, Run

MAIN = "import sys; from lmx.cli.main import train; sys.exit(train())"
# Shards of a few windows, so that every process has some. Rank 1 is late everywhere: no
# rank may take away what another one has not read yet.
PRELUDE = """
import os, time
from lmx.interfaces import Communicator
from lmx.quantization.ptq import sequential

sequential.BATCH_TOKENS = 512

def late(method):
    def call(*arguments):
        result = method(*arguments)
        time.sleep(0.05)
        return result
    return call

for name in ("broadcast_object", "gather_objects", "wait_for_all"):
    if os.environ["MLX_RANK"] == "1":
        setattr(Communicator, name, late(getattr(Communicator, name)))
"""
CALIBRATION = {
    "dataset": "builtin:stdlib",
    "num_tokens": 4096,
    "max_seq_length": 64,
    "num_eval_tokens": 2048,
}
GPTQ = {"method": "gptq", "bits": 4, "effort": "fast", "calibration": CALIBRATION}
STAGES = {
    "gptq": GPTQ | {"rollback_if_worse": True},
    "mixed precision": {
        "calibration": CALIBRATION,
        "mixed_precision": {"target_bpw": 5.0, "candidate_bits": [3, 4, 8]},
        "kv_cache": {"average_bits": 6},
    },
    "awq": {"method": "awq", "bits": 4, "calibration": CALIBRATION},
    "smoothed": {
        "mode": "nvfp4",
        "quantize_activations": True,
        "calibration": CALIBRATION,
    },
}


@pytest.fixture
def small_shards(monkeypatch):
    from lmx.quantization.ptq import sequential

    monkeypatch.setattr(sequential, "BATCH_TOKENS", 512)


@pytest.fixture
def make_run(make_checkpoint, tmp_path, small_shards):
    """A function from a name and a quantize block to a run."""

    def run(name: str, stage: dict) -> Run:
        (tmp_path / name).mkdir()
        model = make_checkpoint(num_hidden_layers=2, tie_word_embeddings=False)
        return Run(tmp_path / name, {"quantize": stage}, model=model)

    return run


def in_processes(run: Run, count: int, *, program: str = MAIN, before=()) -> list:
    arguments = [*before, *run.arguments()]
    return in_ring(PRELUDE + program, *arguments, folder=run.folder, count=count)


def weights_of(run: Run) -> dict[str, np.ndarray]:
    [file] = run.output.glob("stages/*/model/model.safetensors")
    return {
        name: np.array(value.astype(mx.float32) if value.dtype != mx.uint32 else value)
        for name, value in mx.load(str(file)).items()
    }


def facts_of(run: Run) -> dict:
    [stage] = run.json("manifest.json")["stages"].values()
    return stage["result"]["facts"]


def numbers_in(value) -> list[float]:
    """The numbers in a JSON value, in the order of its keys."""
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    if isinstance(value, list):
        return [number for each in value for number in numbers_in(each)]
    return [value] if isinstance(value, int | float) else []


def assert_same(run: Run, expected: Run) -> None:
    """Codes, scales and measured values are equal, except for rounding."""
    weights, others = weights_of(run), weights_of(expected)
    assert weights.keys() == others.keys()
    moved = total = 0
    for name, value in others.items():
        if value.dtype == np.uint32:
            moved += np.count_nonzero(weights[name] != value)
            total += value.size
        else:
            np.testing.assert_allclose(weights[name], value, atol=1e-3, rtol=2e-3)
    assert moved <= 1e-3 * total
    facts, other_facts = facts_of(run), facts_of(expected)
    for key in ("selected_candidate", "kept"):
        assert facts.get(key) == other_facts.get(key)
    numbers = numbers_in(other_facts)
    assert numbers_in(facts) == pytest.approx(numbers, rel=1e-3, abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("case", STAGES)
def test_two_processes_make_the_model_of_one(make_run, tmp_path, monkeypatch, case):
    expected = make_run("one", STAGES[case])
    assert expected() == 0
    # Sensitivities are cached by model and tokens.
    monkeypatch.setenv("LMX_CACHE", str(tmp_path / "cache"))
    run = make_run("two", STAGES[case])
    first, second = in_processes(run, 2)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr
    assert second.stdout == second.stderr == ""
    assert_same(run, expected)
    assert not run.partial_files()
    [stage] = run.output.glob("stages/*")
    assert not [p for p in stage.iterdir() if p.name in ("scratch", "candidate")]


@pytest.fixture
def undisturbed(make_run):
    """A run of one process."""
    run = make_run("undisturbed", GPTQ)
    assert run() == 0
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "call", "count"),
    [
        pytest.param(1, 7, 3, id="rank 1 before the blocks"),
        pytest.param(0, 30, 1, id="rank 0 in a block"),
    ],
)
def test_killed_run_resumes_with_other_processes(
    make_run, undisturbed, rank, call, count
):
    run = make_run("killed", GPTQ)
    killer = [str(rank), "SIGKILL", "save", str(call)]
    processes = in_processes(run, 2, program=SIGNAL_ONE_RANK, before=killer)
    assert processes[rank].returncode == -signal.SIGKILL
    assert processes[1 - rank].returncode == 1
    assert f"process {rank} ended; the others end" in processes[1 - rank].stderr
    assert not list(run.output.glob("stages/*/model"))
    if count == 1:
        assert run() == 0
    else:
        results = in_processes(run, count)
        assert [each.returncode for each in results] == [0] * count, results[0].stderr
    assert not run.partial_files()
    assert_same(run, undisturbed)
    # No block is done twice.
    for block in (1, 2):
        assert run.log.count(f"block {block} of 2 quantized") == 1


ELSEWHERE = '    sys.argv[2] += "-elsewhere"\n'
OTHER_TOKENS = """
    from lmx.pipeline.quantize.calibration import CalibrationData
    real = CalibrationData.train_sequences
    CalibrationData.train_sequences = lambda self, tokens: real(self, tokens)[::-1]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("difference", "message"),
    [
        (ELSEWHERE, "this machine sees another one than rank 0"),
        (OTHER_TOKENS, "process 1 calibrates on other tokens than the first one"),
    ],
)
def test_processes_must_have_one_folder_and_the_same_tokens(
    make_run, difference, message
):
    run = make_run("other", GPTQ)
    program = 'import os, sys\nif os.environ["MLX_RANK"] == "1":\n' + difference + MAIN
    first, second = in_processes(run, 2, program=program)
    assert (first.returncode, second.returncode) == (2, 2)
    # Either process may be the first one that raises.
    assert (first.stderr + second.stderr).count(message) == 1
