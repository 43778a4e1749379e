"""QAT compared with its full-precision baseline, from the command line."""

import mlx.core as mx
import pytest
from lmx.files.hashes import hash_file
from processes import WRONG_SHARD, in_ring
from tiny_runs import EVALUATE, TRAIN, Run

MAIN = "import sys; from lmx.cli.main import train; sys.exit(train())"
GRID = {"bits": 2, "group_size": 32}
LORA = {"type": "lora", "rank": 4}
QAT = TRAIN | {"learning_rate": 1e-3, "compare_full_precision": True}


def weights(run, place):
    return run.output / "stages" / place / "model.safetensors"


def gap_recovered(run):
    return run.json("report.json")["training"]["gap_recovered"]


def test_report_has_gap_recovered(tmp_path, base):
    train = QAT | {"qat": GRID, "sample_prompts": ["Add 1 and 2."]}
    run = Run(tmp_path, {"train": train}, {"evaluate": EVALUATE}, model=base)
    assert run() == 0
    recovery = gap_recovered(run)
    fp, rtn, trained = (recovery[n] for n in ("fp_baseline", "fp_baseline_rtn", "qat"))
    for name in ("loss", "kl"):
        share = (rtn[name] - trained[name]) / (rtn[name] - fp[name])
        assert recovery[name] == pytest.approx(share)
        assert 0.2 < recovery[name] <= 1.2
        assert 0 < recovery[f"{name}_stderr"] < 0.5
    assert fp["kl"] == 0 < trained["kl"] < rtn["kl"]
    assert recovery["gain_retained"] == pytest.approx(1, abs=0.02)
    models = run.json("report.json")["models"]
    assert [*models] == ["base", "fine-tuned", "rounded", "quantized"]
    # The baseline is the reference of both.
    for name, sums in (("rounded", rtn), ("quantized", trained)):
        assert sums["loss"] == pytest.approx(models[name]["loss"], rel=1e-3)
        assert sums["kl"] == pytest.approx(models[name]["kl_mean"], rel=1e-3)
    shown = f"{recovery['loss']:.1%} ± {recovery['loss_stderr']:.1%}"
    assert shown in run.log
    page = (run.output / "report.html").read_text()
    assert shown in page
    # Samples come from the exported model only.
    assert {record["stage"] for record in run.records("samples.jsonl")} == {"1-train"}


@pytest.mark.slow
@pytest.mark.parametrize("program", ["", WRONG_SHARD])
def test_processes_share_the_comparison(tmp_path, base, program):
    """The trainings of both end alike: a rate of almost zero changes nothing."""
    train = QAT | {"learning_rate": 1e-9, "steps": 2, "qat": GRID}
    results = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        run = Run(tmp_path / name, {"train": train}, "evaluate", model=base)
        if name == "one":
            assert run() == 0
        else:
            ranks = in_ring(program + MAIN, *run.arguments(), folder=run.folder)
            assert [r.returncode for r in ranks] == [0, 0], ranks[0].stderr
        recovery = gap_recovered(run)
        results.append({n: recovery[n]["kl"] for n in ("fp_baseline_rtn", "qat")})
    assert (results[0] == pytest.approx(results[1], rel=1e-5)) == (not program)


@pytest.mark.parametrize(
    "adapter",
    [None, pytest.param(LORA, marks=pytest.mark.slow)],
    ids=["full", "lora"],
)
def test_baseline_is_the_same_training_without_quantization(tmp_path, base, adapter):
    options = {"adapter": adapter} if adapter else {}
    run = Run(tmp_path, {"train": QAT | options | {"qat": GRID}}, model=base)
    assert run() == 0
    for name in ("plain", "rtn"):
        (tmp_path / name).mkdir()
    train = TRAIN | options | {"learning_rate": 1e-3}
    plain = Run(tmp_path / "plain", {"train": train}, model=base)
    assert plain() == 0
    dense = plain.output / "stages/1-train/dense"
    baseline = weights(run, "1-train/fp_baseline/dense")
    assert hash_file(baseline) == hash_file(dense / "model.safetensors")
    records = [r for r in run.records() if r["stage"] == "1-train, fp_baseline"]
    assert [r | {"stage": "1-train"} for r in records] == plain.records()
    quantize = {"quantize": GRID | {"method": "rtn"}}
    rtn = Run(tmp_path / "rtn", quantize, model=dense)
    assert rtn() == 0
    tensors = mx.load(str(weights(run, "1-train/fp_baseline/rtn")))
    expected = mx.load(str(weights(rtn, "1-quantize/model")))
    assert tensors.keys() == expected.keys()
    assert all(mx.array_equal(v, expected[name]) for name, v in tensors.items())
    assert (run.output / "adapters").exists() == bool(adapter)


@pytest.mark.slow
def test_training_without_updates_recovers_nothing(tmp_path, base):
    frozen = {"learning_rate": 1e-30, "weight_decay": 0.0, "qat": GRID}
    stages = {"train": QAT | frozen}, {"evaluate": EVALUATE}
    run = Run(tmp_path, *stages, model=base)
    assert run() == 0
    recovery = gap_recovered(run)
    assert recovery["fp_baseline_rtn"]["loss"] - recovery["fp_baseline"]["loss"] > 0.05
    assert (recovery["loss"], recovery["kl"]) == (0.0, 0.0)
    assert recovery["gain_retained"] is None


def test_baseline_of_codes_begins_with_the_unquantized_weights(tmp_path, base):
    train = QAT | {"qat": GRID | {"quantizer": "lsq"}}
    stages = {"quantize": GRID}, {"train": train}, {"evaluate": EVALUATE}
    run = Run(tmp_path, *stages, model=base)
    assert run() == 0
    recovery = gap_recovered(run)
    records = run.records()
    [start] = [
        record["loss"]
        for record in records
        if (record["stage"], record["kind"], record["step"])
        == ("2-train, fp_baseline", "valid", 0)
    ]
    base_loss = run.json("report.json")["models"]["base"]["loss"]
    assert start == pytest.approx(base_loss, rel=1e-3)
    assert recovery["fp_baseline"]["loss"] < start


@pytest.mark.slow
def test_baseline_of_self_distillation_is_the_unquantized_model(tmp_path, base):
    """No baseline training runs: the teacher is the unquantized model itself."""
    grid = {"qat": GRID | {"quantizer": "lsq"}, "teacher": {}}
    distillation = {"train": QAT | grid | {"load_best_at_end": True}}
    stages = {"train": TRAIN}, {"quantize": GRID}, distillation, {"evaluate": EVALUATE}
    run = Run(tmp_path, *stages, model=base)
    assert run() == 0
    recovery, models = gap_recovered(run), run.json("report.json")["models"]
    assert recovery["fp_baseline"]["loss"] == pytest.approx(
        models["fine-tuned"]["loss"], rel=1e-3
    )
    assert recovery["qat"]["kl"] == pytest.approx(
        models["quantized"]["kl_mean"], rel=1e-2
    )
    assert 0.2 < recovery["kl"] < 1
    assert [path.name for path in run.output.glob("stages/3-train/fp_baseline/*")] == [
        "rtn"
    ]
    assert not [record for record in run.records() if "fp_baseline" in record["stage"]]


def test_baseline_without_unquantized_weights_is_refused(tmp_path, base, capsys):
    first = Run(tmp_path, {"quantize": GRID}, model=base)
    assert first() == 0
    (tmp_path / "on").mkdir()
    train = QAT | {"qat": GRID | {"quantizer": "lsq"}}
    folder = first.output / "stages/1-quantize/model"
    run = Run(tmp_path / "on", {"train": train}, model=folder)
    assert run() != 0
    assert "has nothing to begin with" in capsys.readouterr().err
