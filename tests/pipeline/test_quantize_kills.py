"""A quantization that was killed goes on, and leaves what an undisturbed one leaves."""

import signal

from lmx.run.fs import hash_folder
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
# Files that the walk writes: 4 in front of the blocks, 7 for each, 1 after them.
IN_A_BLOCK, AT_THE_END = 4 + 7 + 4, 7 + 7 + 1


def test_gptq_resumes_after_repeated_kills(make_checkpoint, tmp_path):
    model = make_checkpoint(num_hidden_layers=3, tie_word_embeddings=False)
    left = {}
    for name, turns in {
        "whole": (),
        "killed": (IN_A_BLOCK, AT_THE_END),
    }.items():
        (tmp_path / name).mkdir()
        run = Run(tmp_path / name, STAGE, model=model)
        for turn in turns:
            done = run.attacked("SIGKILL", "save", turn)
            assert done.returncode == -signal.SIGKILL, done.stderr
            assert not list(run.output.glob("stages/*/model"))
        assert run() == 0
        assert all(run.log.count(f"block {n} of 3 quantized") == 1 for n in (1, 2))
        assert not run.half_written()
        [stage] = run.output.glob("stages/*")
        # What the walk kept is gone.
        assert [path.name for path in stage.iterdir()] == ["model"]
        left[name] = hash_folder(stage / "model")
    assert "model.safetensors" in left["whole"]
    assert left["killed"] == left["whole"]
