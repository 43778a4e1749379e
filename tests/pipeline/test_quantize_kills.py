"""A killed quantization resumes and writes the files of an undisturbed one."""

import signal

import pytest
from lmx.files.hashes import hash_folder
from tiny_runs import Run

STAGE = {
    "quantize": {
        "method": "gptq",
        "bits": 3,
        "calibration": {
            "dataset": "builtin:stdlib",
            "num_tokens": 4096,
            "max_seq_length": 64,
        },
        "scale_tuning": {"steps": 4, "batch_tokens": 256, "learning_rate": 1e-3},
    }
}
# Files that the run writes: 4 before the blocks, 7 per block, 1 after the blocks.
IN_A_BLOCK, AT_THE_END = 4 + 7 + 4, 7 + 7 + 1


@pytest.mark.slow
def test_gptq_resumes_after_repeated_kills(make_checkpoint, tmp_path):
    model = make_checkpoint(num_hidden_layers=3, tie_word_embeddings=False)
    hashes = {}
    for name, calls in {
        "undisturbed": (),
        "killed": (IN_A_BLOCK, AT_THE_END),
    }.items():
        (tmp_path / name).mkdir()
        run = Run(tmp_path / name, STAGE, model=model)
        for call in calls:
            process = run.run_with_signal("SIGKILL", "save", call)
            assert process.returncode == -signal.SIGKILL, process.stderr
            assert not list(run.output.glob("stages/*/model"))
        assert run() == 0
        assert all(run.log.count(f"block {n} of 3 quantized") == 1 for n in (1, 2))
        assert not run.partial_files()
        [stage] = run.output.glob("stages/*")
        # The intermediate files are deleted.
        assert {path.name for path in stage.iterdir()} == {
            "model",
        }
        hashes[name] = hash_folder(stage / "model")
    assert "model.safetensors" in hashes["undisturbed"]
    assert hashes["killed"] == hashes["undisturbed"]


@pytest.mark.slow
def test_killed_search_leaves_no_folder(make_checkpoint, tmp_path):
    budget = {"target_bpw": 5.0, "candidate_bits": [4, 8]}
    stage = {"quantize": STAGE["quantize"] | {"mixed_precision": budget}}
    run = Run(tmp_path, stage, model=make_checkpoint(num_hidden_layers=1))
    # The first file that the run writes has the gradients of a sequence.
    assert run.run_with_signal("SIGKILL", "save", 1).returncode == -signal.SIGKILL
    [scratch] = (p for p in run.output.glob("stages/*/*") if p.is_dir())
    assert run() == 0
    assert not scratch.exists()
    [stage] = run.output.glob("stages/*")
    files = {path.name for path in stage.iterdir()}
    assert files == {"model", "sensitivity.json"}
