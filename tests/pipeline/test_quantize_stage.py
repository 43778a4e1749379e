"""What follows a method in a quantize stage: gates, tuning, and rows kept apart."""

from types import SimpleNamespace

import numpy as np
import pytest
from lmx.config.quantize import CalibrationConfig
from lmx.data.batching import BucketBatchSampler
from lmx.data.calibration import CalibrationBatch
from lmx.data.dataset import RecordReader
from lmx.data.record_formats import DataRecord
from lmx.data.tokenization import encode_all
from lmx.errors import UserError
from lmx.evaluation.gap_recovery import measure_per_sequence
from lmx.models.loader import load
from lmx.pipeline.ptq_refinement import CalibrationData
from tiny_runs import Run

QUANTIZE = {
    "bits": 2,
    "group_size": 32,
    "calibration": {"num_tokens": 512, "max_seq_length": 32, "num_eval_tokens": 128},
}
TUNE = {"steps": 4, "batch_tokens": 64, "learning_rate": 3e-3}


def facts_of(folder, base, **settings):
    run = Run(folder, {"quantize": QUANTIZE | settings}, model=base)
    assert run() == 0
    return run, run.json("manifest.json")["stages"]["1-quantize"]["facts"]["facts"]


def test_quantize_stage_selects_best_candidate(tmp_path, base):
    run, facts = facts_of(tmp_path, base, method="gptq", scale_tuning=TUNE)
    found = facts["eval_kl"]
    assert list(found) == ["rtn", "gptq", "scale_tuning"]
    assert found[facts["selected_candidate"]] == min(found.values())
    assert "gptq: held-out KL" in run.log
    left = {path.name for path in (run.output / "stages/1-quantize").iterdir()}
    assert left <= {"model", "walk"}


def test_eval_kl_covers_completions_only(tmp_path, base):
    """Where they alone count, against the whole answers of the validation rows."""
    calibration = QUANTIZE["calibration"] | {
        "loss_on": "completions",
        "num_eval_tokens": 10_000,
    }
    tune = TUNE | {"top_k": 10_000}
    given = {"method": "gptq", "calibration": calibration, "scale_tuning": tune}
    run, facts = facts_of(tmp_path, base, **given)
    found = load(run.output / "stages/1-quantize/model")
    rows = [*RecordReader(str(tmp_path / "valid.jsonl"), split="train")]
    examples = encode_all(rows, found.tokenizer, max_seq_length=32).examples
    batches = BucketBatchSampler(
        examples, max_seq_length=32, batch_tokens=1024
    ).in_order()
    sums = measure_per_sequence(load(base).model, found.model, list(batches))
    expected = sums.kl.sum() / sums.tokens.sum()
    assert facts["eval_kl"][facts["selected_candidate"]] == pytest.approx(
        expected, rel=0.01
    )


@pytest.mark.parametrize(
    ("settings", "judged"),
    [
        ({"method": "rtn"}, None),
        ({"method": "rtn", "scale_tuning": TUNE}, ["rtn", "scale_tuning"]),
        ({"method": "gptq", "scale_tuning": False}, ["rtn", "gptq"]),
        ({"method": "gptq", "scale_tuning": False, "rollback_if_worse": False}, None),
    ],
)
def test_eval_kl_has_only_configured_candidates(tmp_path, base, settings, judged):
    _, facts = facts_of(tmp_path, base, **settings)
    assert judged == (list(facts["eval_kl"]) if judged else None)
    assert ("eval_kl" in facts) == bool(judged)


def calibrating(monkeypatch, train, valid):
    """Windows of one token each, the number of a row."""

    def windows(rows, tokenizer, *, length, tokens, seed):
        numbers = [int(row.text) for row in rows][:tokens]
        if not numbers:
            raise UserError("too few")
        tokens = np.array(numbers, np.int32)[:, None]
        return CalibrationBatch(tokens, np.ones(tokens.shape, bool))

    monkeypatch.setattr("lmx.pipeline.ptq_refinement.concatenated_sequences", windows)
    rows = {
        split: [DataRecord(str(n), text=str(n)) for n in numbers]
        for split, numbers in (("train", train), ("valid", valid))
    }
    context = SimpleNamespace(
        rows=SimpleNamespace(**rows),
        data=SimpleNamespace(train=["a"], valid=["b"] if valid else []),
        logger=SimpleNamespace(info=lambda _: None),
        seed=0,
    )
    calibration = CalibrationConfig.model_construct(
        dataset=None, max_seq_length=1, num_eval_tokens=3
    )
    return CalibrationData(calibration, context, None, holds_out=True)


@pytest.mark.parametrize("valid", [[], [100, 101], [2, 3, 4]])
def test_calibration_and_evaluation_tokens_are_disjoint(monkeypatch, valid):
    found = calibrating(monkeypatch, range(20), valid)
    watched = set(found.train_sequences(8).tokens.flatten().tolist())
    assert len(watched) == 8
    held_out = set(found.eval_sequences.tokens.flatten().tolist())
    assert held_out
    assert not watched & held_out
    assert held_out == set(valid) if valid else held_out == {0, 1, 2}
