"""Distillation from the command line: choice of the teacher, exact resume."""

import json
import shutil

import pytest
from lmx.cli import main
from tiny_runs import TRAIN, Run

GRID = {"bits": 2, "group_size": 32}
QUANTIZED = {"quantize": GRID}
QAT = TRAIN | {"qat": GRID}
QAT_4BIT = QAT | {"qat": {"bits": 4, "group_size": 32}}
OFFLINE = {"offline": True, "top_k": 8, "loss": "reverse_kl", "ce_weight": 0.2}
GENERATED = OFFLINE | {"sequence_level": {"max_tokens": 8}}


def distill(**teacher):
    return QAT | {"teacher": teacher}


def losses(run, kind="train"):
    return [record["loss"] for record in run.records() if record["kind"] == kind]


def test_distillation_recovers_the_quantized_model(tmp_path, base):
    """The teacher is the unquantized model. Offline logits give the same losses."""
    (tmp_path / "cached").mkdir()
    longer = {"steps": 30, "learning_rate": 1e-3, "load_best_at_end": True}
    online = Run(tmp_path, QUANTIZED, {"train": distill() | longer}, model=base)
    assert online() == 0
    assert f"teacher: {base}" in online.log
    # The loss is the divergence from the teacher.
    assert losses(online)[-1] < 0.5 * losses(online)[0]
    # So is the validation loss, which selects the best checkpoint.
    first, *_, last = losses(online, "valid")
    assert 0.5 < first / losses(online)[0] < 2
    assert last < 0.5 * first
    train = distill(offline=True, top_k=320) | longer
    offline = Run(tmp_path / "cached", QUANTIZED, {"train": train}, model=base)
    assert offline() == 0
    assert losses(offline)[0] == pytest.approx(losses(online)[0], abs=2e-5)
    for kind in ("train", "valid"):
        assert losses(offline, kind) == pytest.approx(losses(online, kind), abs=5e-4)
    assert "MB in" in offline.log


def renumber(model, folder):
    """Copy a checkpoint; two of its tokens change places."""
    shutil.copytree(model, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    *_, first, second = sorted(vocabulary, key=vocabulary.get)
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture
def renumbered(tmp_path, make_checkpoint):
    return renumber(make_checkpoint(), tmp_path / "other")


STORED = {"offline": True, "top_k": 8, "ce_weight": 0.2}


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ({}, "must be stored"),
        (OFFLINE, "reverse_kl needs a teacher with the model's own tokenizer"),
        (STORED | {"sequence_level": {}}, "sequence_level needs a teacher with"),
    ],
)
def test_what_another_tokenizer_cannot_give_is_refused(
    tmp_path, renumbered, make_checkpoint, capsys, teacher, message
):
    train = distill(model=str(renumbered), **teacher)
    run = Run(tmp_path, {"train": train}, model=make_checkpoint())
    assert run() == 2
    error = capsys.readouterr().err
    assert "the teacher has other tokens than the model: 2 differ" in error
    assert message in error


@pytest.mark.parametrize(
    ("model", "train", "message"),
    [
        ("base", TRAIN | {"teacher": {}}, "the same model"),
        ("", TRAIN | {"teacher": {}}, "cannot teach itself"),
        ("codes", QAT_4BIT | {"teacher": {}}, "is quantized, and its full-precision"),
        ("base", TRAIN | {"teacher": {"model": "./none"}}, "no such file or folder"),
        ("base", TRAIN | {"teacher": {"top_k": 9}}, "top_k needs offline: true"),
    ],
)
def test_teacher_without_signal_is_refused(
    tmp_path, base, full_run, capsys, model, train, message
):
    codes = full_run.output / "stages" / "2-quantize" / "model"
    folder = {"base": base, "codes": codes, "": ""}[model]
    run = Run(tmp_path, {"train": train}, model=folder)
    assert main.train(run.arguments()) == 2
    assert message in capsys.readouterr().err
