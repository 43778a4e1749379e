"""A model that an interrupted stage left is checked before the stage goes on."""

import pytest
from folder_damages import DAMAGES
from test_draft_stage import DRAFT, make_run
from tiny_runs import TRAIN, Run

STEPS = TRAIN | {"steps": 2, "eval_steps": 2}
QAT = {"qat": {"bits": 4, "group_size": 32}, "compare_full_precision": True}
BASELINE = "train.fp_baseline.FullPrecisionBaseline.compare"
FROM_SCRATCH = "artifacts/models/from_scratch/content"
DISTILLATION = "draft.training.DraftModelDistillation.make_trainer"


def stop(*_):
    raise KeyboardInterrupt


# The stage, the function after the model was made, and the folder of the model.
@pytest.mark.parametrize(
    ("stage", "place", "name", "damage"),
    [
        ({"train": STEPS}, "train.run.TrainRun.run", FROM_SCRATCH, "flip"),
        ({"train": STEPS | QAT}, BASELINE, "fp_baseline/dense", "lose_file"),
        ({"draft": DRAFT}, DISTILLATION, "artifacts/models/initial/content", "flip"),
    ],
)
def test_damaged_model_is_made_again(
    stage, place, name, damage, base, tmp_path, monkeypatch, capsys
):
    model = "" if name == FROM_SCRATCH else base
    run = (make_run if "draft" in stage else Run)(tmp_path, stage, model=model)
    monkeypatch.setattr(f"lmx.pipeline.{place}", stop)
    assert run("--quiet") == 130
    [model] = run.output.glob(f"stages/*/{name}")
    weights = (model / "model.safetensors").read_bytes()
    capsys.readouterr()
    assert run("--quiet") == 130
    assert "made again" not in capsys.readouterr().err
    DAMAGES[damage](model)
    assert run("--quiet") == 130
    warning = f"{model}: damaged, made again"
    assert capsys.readouterr().err.count(warning) == 1
    assert (model / "model.safetensors").read_bytes() == weights
