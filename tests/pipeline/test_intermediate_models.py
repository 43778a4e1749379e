"""A model that an interrupted stage left is checked before the stage goes on."""

import pytest
from folder_damages import DAMAGES
from test_draft_stage import DRAFT, make_run
from tiny_runs import TRAIN, Run

STEPS = TRAIN | {"steps": 2, "eval_steps": 2}
QAT = {"qat": {"bits": 4, "group_size": 32}, "compare_full_precision": True}
# The stage, the function after the model was made, and the folder of the model.
CASES = {
    "from scratch": ({"train": STEPS}, "train.run.TrainRun.run", "from_scratch"),
    "baseline": (
        {"train": STEPS | QAT},
        "train.fp_baseline.FullPrecisionBaseline.compare",
        "fp_baseline/dense",
    ),
    "draft": (
        {"draft": DRAFT},
        "draft.training.DraftModelDistillation.make_trainer",
        "initial",
    ),
}


def stop(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("damage", ["flip", "lose_file", "become_file"])
@pytest.mark.parametrize("case", CASES)
def test_damaged_model_is_made_again(case, damage, base, tmp_path, monkeypatch, capsys):
    stage, place, name = CASES[case]
    if case == "draft":
        run = make_run(tmp_path, stage, model=base)
    else:
        run = Run(tmp_path, stage, model="" if case == "from scratch" else base)
    monkeypatch.setattr(f"lmx.pipeline.{place}", stop)
    assert run("--quiet") == 130
    [model] = run.output.glob(f"stages/*/{name}")
    weights = (model / "model.safetensors").read_bytes()
    capsys.readouterr()
    assert run("--quiet") == 130
    assert "made again" not in capsys.readouterr().err
    DAMAGES[damage](model)
    assert run("--quiet") == 130
    warning = f"{model}: damaged or incomplete, made again"
    assert capsys.readouterr().err.count(warning) == 1
    assert (model / "model.safetensors").read_bytes() == weights
