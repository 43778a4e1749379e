"""Draft stages of two processes: both train, rank 0 does the rest."""

import pytest
from lmx.files.hashes import hash_file
from test_distributed_runs import assert_close, run_both_ranks
from test_drafter_stage import DRAFT
from tiny_runs import Run

STAGES = {
    "eagle3": DRAFT | {"architecture": "eagle3"},
    "model": {key: value for key, value in DRAFT.items() if key != "drafter"}
    | {"draft_model": {"num_layers": 1}},
}


def make_run(folder, architecture, model):
    folder.mkdir()
    stage = STAGES[architecture] | {"benchmark": {"num_prompts": 2, "max_tokens": 8}}
    stage |= {"steps": 6, "eval_steps": 3}
    run = Run(folder, {"draft": stage}, model=model)
    run.data["max_seq_length"] = 128
    run.write()
    return run


@pytest.mark.parametrize(
    "architecture", ["eagle3", pytest.param("model", marks=pytest.mark.slow)]
)
def test_distributed_draft_matches_one_process(architecture, base, tmp_path):
    plain = make_run(tmp_path / "plain", architecture, base)
    assert plain() == 0
    run = make_run(tmp_path / "two", architecture, base)
    first, second = run_both_ranks(run)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr
    assert "2 processes over ring" in first.stdout
    assert second.stdout == second.stderr == ""
    records = [
        [r for r in each.records() if r["kind"] in ("train", "valid")]
        for each in (run, plain)
    ]
    assert_close(*records)
    reports = [each.json("draft/draft.json") for each in (run, plain)]
    tokens = [report["training"]["trained_tokens"] for report in reports]
    assert tokens[0] == tokens[1] > 0
    # One process finds the stage of both complete, with the published files.
    before = hash_file(run.output / "draft/model.safetensors")
    assert run() == 0
    assert "stage 1-draft: already complete, skipping" in run.log
    assert hash_file(run.output / "draft/model.safetensors") == before
