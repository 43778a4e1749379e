"""Distillation through the command line: which teacher, and the same bits again."""

import json
import shutil
import signal

import pytest
from lmx.cli import main
from tiny_runs import TRAIN, Run

GRID = {"bits": 2, "group_size": 32}
QUANTIZED = {"quantize": GRID}
LEARNED = TRAIN | {"qat": GRID | {"quantizer": "lsq"}}
CODES = LEARNED | {"qat": {"bits": 4, "group_size": 32, "quantizer": "lsq"}}
CACHED = {"offline": True, "top_k": 8, "loss": "cakld", "ce_weight": 0.2}
ANSWERED = CACHED | {"sequence_level": {"max_tokens": 8}}


def student(**teacher):
    return LEARNED | {"teacher": teacher}


def losses(run, kind="train"):
    return [row["loss"] for row in run.rows() if row["kind"] == kind]


def test_distillation_recovers_the_quantized_model(tmp_path, base):
    """The teacher is the unquantized model; cached, it is another way to the same."""
    (tmp_path / "cached").mkdir()
    longer = {"steps": 30, "learning_rate": 1e-3, "load_best_at_end": True}
    live = Run(tmp_path, QUANTIZED, {"train": student() | longer}, model=base)
    assert live() == 0
    assert f"teacher: {base}" in live.log
    # The loss is the divergence from it.
    assert losses(live)[-1] < 0.5 * losses(live)[0]
    # So is that of the validations, by which the best is kept.
    first, *_, last = losses(live, "valid")
    assert 0.5 < first / losses(live)[0] < 2
    assert last < 0.5 * first
    train = student(offline=True, top_k=320) | longer
    cached = Run(tmp_path / "cached", QUANTIZED, {"train": train}, model=base)
    assert cached() == 0
    assert losses(cached)[0] == pytest.approx(losses(live)[0], abs=2e-5)
    for kind in ("train", "valid"):
        assert losses(cached, kind) == pytest.approx(losses(live, kind), abs=5e-4)
    assert "MB in" in cached.log


@pytest.mark.parametrize("teacher", [{}, ANSWERED], ids=["live", "answered"])
def test_distillation_resumes_exactly(tmp_path, base, teacher):
    brief = {"packing": True, "batch_size": 2, "steps": 8}
    train = {"train": student(**teacher) | brief}
    outcomes = []
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        run = Run(tmp_path / name, QUANTIZED, train, model=base)
        if name == "killed":
            assert run.attacked("SIGKILL", "step", 7).returncode == -signal.SIGKILL
        assert run() == 0
        assert "packing is off" not in run.log
        outcomes.append(run.outcome())
    assert "resuming after step 6" in run.log
    assert outcomes[0] == outcomes[1]


def test_teacher_with_other_tokenizer_is_refused(
    tmp_path, base, make_checkpoint, capsys
):
    other = tmp_path / "other"
    shutil.copytree(make_checkpoint(), other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [token for token, n in vocabulary.items() if n in (300, 301)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    run = Run(tmp_path, {"train": student(model=str(other))}, model=make_checkpoint())
    assert run() == 2
    assert "the teacher has other tokens than the model" in capsys.readouterr().err
    run.stages = [{"train": student(model=str(make_checkpoint()))}]
    run.write()
    assert run("--restart") == 0


@pytest.mark.parametrize(
    ("model", "train", "said"),
    [
        ("base", TRAIN | {"teacher": {}}, "the same model"),
        ("", TRAIN | {"teacher": {}}, "cannot teach itself"),
        ("codes", CODES | {"teacher": {}}, "is quantized, and its full-precision"),
        ("base", TRAIN | {"teacher": {"model": "./none"}}, "no such file or folder"),
        ("base", TRAIN | {"teacher": {"top_k": 9}}, "top_k needs offline: true"),
    ],
)
def test_teacher_without_signal_is_refused(
    tmp_path, base, whole, capsys, model, train, said
):
    codes = whole.output / "stages" / "2-quantize" / "model"
    folder = {"base": base, "codes": codes, "": ""}[model]
    run = Run(tmp_path, {"train": train}, model=folder)
    assert main.train(run.arguments()) == 2
    assert said in capsys.readouterr().err
