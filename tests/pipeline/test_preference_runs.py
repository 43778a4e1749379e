"""Preference optimization by recipe: metrics, resuming, references and refusals."""

import json
import math
import shutil

import mlx.core as mx
import pytest
from lmx.config.errors import ConfigErrors
from lmx.config.loader import load_recipe
from lmx.pipeline.train.preference import PreferenceObjective
from lmx.training import reference_log_probs
from tiny_runs import METRICS_ONLY, TRAIN, Run

LORA = {"type": "lora", "rank": 4}
GRID = {"bits": 4, "group_size": 32}
CASES = {
    "dpo-lora": {"loss": {"type": "dpo"}, "adapter": LORA},
    "ipo-qat-lora": {"loss": {"type": "ipo"}, "adapter": LORA, "qat": GRID},
    "orpo-qat": {"loss": {"type": "orpo"}, "qat": GRID},
    "kto-full": {"loss": {"type": "kto"}, "gradient_accumulation_steps": 2},
}


def row(number: int, kind: str) -> dict:
    question = [{"role": "user", "content": f"Add {number} and {number % 7}."}]
    right, wrong = (
        [{"role": "assistant", "content": text}]
        for text in (f"{number + number % 7}", "Nobody knows that.")
    )
    if kind == "kto":
        is_right = number % 2 == 0
        completion = right if is_right else wrong
        return {"prompt": question, "completion": completion, "label": is_right}
    return {"prompt": question, "chosen": right, "rejected": wrong}


def make_run(folder, case: str, base, **train) -> Run:
    folder.mkdir(exist_ok=True)
    run = Run(folder, {"train": TRAIN | CASES[case] | train}, model=base)
    for name, start, count in (("train", 0, 24), ("valid", 100, 8)):
        rows = [row(n, case.split("-")[0]) for n in range(start, start + count)]
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return run


def test_model_begins_at_its_reference(tmp_path, base):
    run = make_run(tmp_path / "run", "dpo-lora", base, learning_rate=0.01)
    assert run() == 0
    first = next(r for r in run.records() if r["kind"] == "valid")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-5)
    trained = [r for r in run.records() if r["kind"] == "train"]
    assert trained[-1]["loss"] < 0.6
    assert trained[-1]["rewards/margins"] > 0.2
    assert trained[-1]["rewards/accuracies"] > 0.7


def test_predictions_of_nan_are_refused_and_not_cached(tmp_path, base, capsys):
    damaged = tmp_path / "damaged"
    shutil.copytree(base, damaged)
    file = str(damaged / "model.safetensors")
    weights = mx.load(file)
    # A value that is finite, and whose products are not.
    weights["model.norm.weight"] = mx.full(weights["model.norm.weight"].shape, 3e38)
    mx.eval(weights)
    mx.save_safetensors(file, weights, {"format": "mlx"})
    for folder in ("run", "again"):
        run = make_run(tmp_path / folder, "dpo-lora", damaged)
        assert run() == 1
        error = capsys.readouterr().err
        assert "the reference's predictions are NaN" in error


def test_reference_is_loaded_once_for_all_blocks_and_runs(tmp_path, base, monkeypatch):
    monkeypatch.setattr(reference_log_probs, "BLOCK_SEQUENCES", 6)
    monkeypatch.setenv("LMX_CACHE", str(tmp_path / "cache"))
    load, calls = PreferenceObjective._load_reference, []

    def counted(self):
        calls.append(self)
        return load(self)

    monkeypatch.setattr(PreferenceObjective, "_load_reference", counted)
    for name, case in enumerate(("dpo-lora", "dpo-lora", "ipo-qat-lora")):
        assert make_run(tmp_path / f"{name}", case, base, steps=6)() == 0
    # For the 48 sequences of the training, and for those of the validation.
    assert len(calls) == 2


def test_reference_of_a_continued_adapter_is_the_base(tmp_path, base):
    first = make_run(tmp_path / "first", "dpo-lora", base)
    assert first() == 0
    adapter = LORA | {"init_from": str(first.output / "adapters")}
    second = make_run(tmp_path / "second", "dpo-lora", base, adapter=adapter)
    assert second() == 0
    start = next(r for r in second.records() if r["kind"] == "valid")
    end = [r for r in first.records() if r["kind"] == "valid"][-1]
    assert start["rewards/margins"] == pytest.approx(end["rewards/margins"], rel=1e-4)


@pytest.mark.parametrize(
    ("case", "train", "message"),
    [
        ("dpo-lora", {"packing": True}, "packing does not work with the loss dpo"),
        ("dpo-lora", {"teacher": {"ce_weight": 0.5}}, "teacher does not work"),
        ("dpo-lora", {"loss": {"type": "orpo", "gamma": 2}}, "orpo has no gamma"),
    ],
)
def test_recipe_errors_name_the_key(tmp_path, base, case, train, message):
    run = make_run(tmp_path / "run", case, base, **train)
    with pytest.raises(ConfigErrors, match=message):
        load_recipe(run.recipe)


def test_kto_needs_both_labels(tmp_path, base, capsys):
    run = make_run(tmp_path / "run", "kto-full", base)
    path = run.folder / "train.jsonl"
    path.write_text(path.read_text().replace("false", "true"))
    assert run() == 2
    assert "all examples have the label true" in capsys.readouterr().err


@pytest.mark.parametrize(
    "loss", [{"type": "kto"}, pytest.param(None, marks=pytest.mark.slow)]
)
def test_validation_has_bad_completions_if_there_are_no_others(loss, tmp_path, base):
    """As in a small part that is held out by chance."""
    run = make_run(tmp_path / "run", "kto-full", base, loss=loss, steps=2)
    run.stages.append({"evaluate": METRICS_ONLY})
    run.write()
    path = run.folder / "valid.jsonl"
    rows = [row(n, "kto") for n in range(100, 108)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows if not r["label"]))
    assert run() == 0
    assert run.log.count("valid: all labels are false, so its loss is that of bad") == 2
    last = [r for r in run.records() if r["kind"] == "valid"][-1]
    measured = {k for k in last if k in ("rewards/chosen", "rewards/rejected", "kl")}
    assert measured == ({"rewards/rejected", "kl"} if loss else set())
    assert all(s["expected"] is None for s in run.json("report.json")["samples"])


def test_kto_with_one_held_out_example_gets_completions_of_the_training(tmp_path, base):
    run = make_run(tmp_path / "run", "kto-full", base, steps=1)
    del run.data["valid"]
    run.write()
    path = run.folder / "train.jsonl"
    path.write_text("".join(json.dumps(row(n, "kto")) + "\n" for n in range(12)))
    assert run() == 0
    assert "valid: 1 examples held out from train" in run.log
    assert any("kl" in r for r in run.records() if r["kind"] == "valid")


def test_skipped_pairs_are_counted(tmp_path, base):
    run = make_run(tmp_path / "run", "dpo-lora", base, steps=1)
    path = run.folder / "train.jsonl"
    rows = [row(n, "dpo") for n in range(24)]
    rows[3]["rejected"][0]["content"] = "word " * 90
    del rows[4]["prompt"]
    rows[4]["chosen"] = [{"role": "user", "content": "1"}, *rows[4]["chosen"]]
    rows[4]["rejected"] = [{"role": "user", "content": "2"}, *rows[4]["rejected"]]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert run() == 0
    assert "train.jsonl:4: example skipped: max_seq_length cuts off a" in run.log
    assert "train.jsonl:5: example skipped: chosen and rejected have differ" in run.log
    assert "22 examples, " in run.log
