"""A quantization-aware stage beside its twin, through the command line."""

import signal

import mlx.core as mx
import pytest
from lmx.config.train import TrainConfig
from lmx.run.fs import hash_file
from pydantic import ValidationError
from tiny_runs import TRAIN, VALIDATE, Run

GRID = {"bits": 2, "group_size": 32}
LORA = {"type": "lora", "rank": 4}
AWARE = TRAIN | {"learning_rate": 1e-3, "compare_full_precision": True}


def weights(run, place):
    return run.output / "stages" / place / "model.safetensors"


def recovered(run):
    return run.json("report.json")["training"]["gap_recovered"]


def test_report_has_gap_recovered(tmp_path, base):
    train = AWARE | {"qat": GRID, "sample_prompts": ["Add 1 and 2."]}
    run = Run(tmp_path, {"train": train}, {"evaluate": VALIDATE}, model=base)
    assert run() == 0
    found = recovered(run)
    full, rounded, trained = (
        found[n] for n in ("fp_baseline", "fp_baseline_rtn", "qat")
    )
    for name in ("loss", "kl"):
        share = (rounded[name] - trained[name]) / (rounded[name] - full[name])
        assert found[name] == pytest.approx(share)
        assert 0.2 < found[name] <= 1.2
        assert 0 < found[f"{name}_stderr"] < 0.5
    assert full["kl"] == 0 < trained["kl"] < rounded["kl"]
    assert found["gain_retained"] == pytest.approx(1, abs=0.02)
    served = run.json("report.json")["models"]["quantized"]["loss"]
    assert trained["loss"] == pytest.approx(served, rel=1e-3)
    shown = f"{found['loss']:.1%} ± {found['loss_stderr']:.1%}"
    assert shown in run.log
    page = (run.output / "report.html").read_text()
    assert shown in page.replace("\u00a0", " ")
    # One set of answers, those of the model that is left.
    assert {row["stage"] for row in run.rows("samples.jsonl")} == {"1-train"}


@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
def test_baseline_is_the_same_training_without_quantization(tmp_path, base, adapter):
    more = {"adapter": adapter} if adapter else {}
    train = AWARE | more | {"qat": GRID}
    run = Run(tmp_path, {"train": train}, model=base)
    assert run() == 0
    (tmp_path / "plain").mkdir()
    block = {k: v for k, v in (TRAIN | more).items()}
    plain = Run(
        tmp_path / "plain", {"train": block | {"learning_rate": 1e-3}}, model=base
    )
    assert plain() == 0
    twin, alone = (
        weights(run, "1-train/fp_baseline/dense"),
        weights(plain, "1-train/dense"),
    )
    assert hash_file(twin) == hash_file(alone)
    own = [row for row in run.rows() if row["stage"] == "1-train, fp_baseline"]
    assert [r | {"stage": "1-train"} for r in own] == plain.rows()
    (tmp_path / "rtn").mkdir()
    place = tmp_path / "plain/out/stages/1-train/dense"
    quantize = {"quantize": GRID | {"method": "rtn"}}
    rounded = Run(tmp_path / "rtn", quantize, model=place)
    assert rounded() == 0
    ours, theirs = (
        mx.load(str(weights(r, p)))
        for r, p in ((run, "1-train/fp_baseline/rtn"), (rounded, "1-quantize/model"))
    )
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[name], theirs[name]) for name in ours)
    assert (run.output / "adapters").exists() == bool(adapter)


def test_training_without_updates_recovers_nothing(tmp_path, base):
    still = {"learning_rate": 1e-30, "weight_decay": 0.0, "qat": GRID}
    stages = {"train": AWARE | still}, {"evaluate": VALIDATE}
    run = Run(tmp_path, *stages, model=base)
    assert run() == 0
    found = recovered(run)
    assert found["fp_baseline_rtn"]["loss"] - found["fp_baseline"]["loss"] > 0.05
    assert (found["loss"], found["kl"]) == (0.0, 0.0)
    assert found["gain_retained"] is None


def test_baseline_of_codes_begins_with_the_unquantized_weights(tmp_path, base):
    train = AWARE | {"qat": GRID | {"quantizer": "lsq"}}
    stages = {"quantize": GRID}, {"train": train}, {"evaluate": VALIDATE}
    run = Run(tmp_path, *stages, model=base)
    assert run() == 0
    found = recovered(run)
    first = run.rows()
    [start] = [
        row["loss"]
        for row in first
        if (row["stage"], row["kind"], row["step"])
        == ("2-train, fp_baseline", "valid", 0)
    ]
    before = run.json("report.json")["models"]["base"]["loss"]
    assert start == pytest.approx(before, rel=1e-3)
    assert found["fp_baseline"]["loss"] < start


def test_baseline_of_self_distillation_is_the_unquantized_model(tmp_path, base):
    """Nothing is trained a second time, for there is nothing the twin could learn."""
    grid = {"qat": GRID | {"quantizer": "lsq"}, "teacher": {}}
    taught = {"train": AWARE | grid | {"load_best_at_end": True}}
    stages = {"train": TRAIN}, {"quantize": GRID}, taught, {"evaluate": VALIDATE}
    run = Run(tmp_path, *stages, model=base)
    assert run() == 0
    found, models = recovered(run), run.json("report.json")["models"]
    assert found["fp_baseline"]["loss"] == pytest.approx(
        models["fine-tuned"]["loss"], rel=1e-3
    )
    assert found["qat"]["kl"] == pytest.approx(models["quantized"]["kl_mean"], rel=1e-2)
    assert 0.2 < found["kl"] < 1
    assert [path.name for path in run.output.glob("stages/3-train/fp_baseline/*")] == [
        "rtn"
    ]
    assert not [row for row in run.rows() if "fp_baseline" in row["stage"]]


def test_baseline_without_unquantized_weights_is_refused(tmp_path, base, capsys):
    first = Run(tmp_path, {"quantize": GRID}, model=base)
    assert first() == 0
    (tmp_path / "on").mkdir()
    train = AWARE | {"qat": GRID | {"quantizer": "lsq"}}
    folder = first.output / "stages/1-quantize/model"
    run = Run(tmp_path / "on", {"train": train}, model=folder)
    assert run() != 0
    assert "has nothing to begin with" in capsys.readouterr().err


@pytest.mark.parametrize("turn", [15, 21])
def test_baseline_training_resumes_after_kill(tmp_path, base, turn):
    """Of the 24 steps the last 12 are the twin's."""
    stages = {"train": AWARE | {"qat": GRID}}, {"evaluate": VALIDATE}
    (tmp_path / "whole").mkdir()
    whole, run = (Run(f, *stages, model=base) for f in (tmp_path / "whole", tmp_path))
    assert whole() == 0
    assert run.attacked("SIGKILL", "step", turn).returncode == -signal.SIGKILL
    assert run() == 0
    assert run.log.count("resuming after step") == 2
    twin = (
        weights(run, "1-train/fp_baseline/dense"),
        weights(whole, "1-train/fp_baseline/dense"),
    )
    assert hash_file(twin[0]) == hash_file(twin[1])
    assert run.outcome() == whole.outcome()
    assert recovered(run) == recovered(whole)


def test_baseline_needs_qat():
    with pytest.raises(ValidationError, match="compare_full_precision needs qat"):
        TrainConfig(steps=1, batch_size=1, compare_full_precision=True)
