"""Drafts in the GGUF export: of the recipe's draft stage, or of another run."""

import mlx.core as mx
import pytest
from lmx.convert.gguf import reader
from lmx.convert.importers import load_model
from test_drafter_stage import DRAFT
from tiny_runs import Run

TOKENS = mx.array([[5, 80, 200, 7, 33, 120]])
EXPORT = {"export": {"formats": ["gguf"]}}
TARGET = {"num_hidden_layers": 5}


def draft_stage(architecture, **drafter):
    settings = DRAFT | {"architecture": architecture}
    return {"draft": settings | {"drafter": settings["drafter"] | drafter}}


@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        ([draft_stage("eagle3", num_layers=2), EXPORT], "drafters of 2 layers"),
        ([draft_stage("dflash", layer_ids=[1, 4]), EXPORT], "last block (4)"),
        # The controls.
        ([draft_stage("eagle3"), EXPORT], None),
        ([EXPORT, draft_stage("eagle3", num_layers=2)], None),
    ],
)
def test_a_drafter_that_llama_cpp_lacks_is_refused_before_training(
    tmp_path, make_checkpoint, capsys, stages, problem
):
    run = Run(tmp_path, *stages, model=make_checkpoint(**TARGET))
    assert run("--dry-run") == (2 if problem else 0)
    error = capsys.readouterr().err
    assert not problem or problem in error
    assert ("exports the model alone" in error) == bool(problem)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"formats": ["mlx"], "draft_model": "a/b"}, "draft_model needs gguf"),
        ({"formats": ["gguf"], "draft_model": "./nowhere"}, "no such file or folder"),
    ],
)
def test_a_draft_that_cannot_be_exported(tmp_path, base, capsys, keys, message):
    run = Run(tmp_path, {"export": keys}, model=base)
    assert run("--dry-run") == 2
    assert message in capsys.readouterr().err


def test_a_draft_of_another_run_is_exported(tmp_path, base, make_checkpoint):
    draft = make_checkpoint()
    keys = {"formats": ["gguf"], "draft_model": str(draft)}
    run = Run(tmp_path, {"export": keys}, model=base)
    assert run() == 0
    file = run.output / "gguf" / "draft" / "tiny-draft.gguf"
    expected = load_model(draft).model(TOKENS)
    assert mx.allclose(load_model(file).model(TOKENS), expected, atol=1e-4)
    assert "llama-server -m tiny.gguf -md draft/tiny-draft.gguf" in run.log
    # The folder is that of the model.
    exported = load_model(run.output / "gguf").model(TOKENS)
    assert mx.allclose(exported, load_model(base).model(TOKENS), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["eagle3", "dflash", "model"])
def test_the_draft_of_the_run_is_exported(tmp_path, make_checkpoint, architecture):
    stage = draft_stage(architecture)
    if architecture == "model":
        stage["draft"].pop("drafter")
    run = Run(tmp_path, stage, EXPORT, model=make_checkpoint(**TARGET))
    run.data["max_seq_length"] = 128
    run.write()
    assert run() == 0
    metadata, tensors = reader.read(run.output / "gguf/draft/tiny-draft.gguf")
    kind = "llama" if architecture == "model" else architecture
    assert metadata["general.architecture"] == kind
    assert ("fc.weight" in tensors) == (architecture != "model")
