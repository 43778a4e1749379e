"""The quantize stage after its method: comparison with RTN, held-out sequences."""

from types import SimpleNamespace

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from lmx.api.model import Model
from lmx.config.quantize import CalibrationConfig
from lmx.data.batching import BucketBatchSampler
from lmx.data.calibration import CalibrationBatch, TooFewTokens
from lmx.data.dataset import RecordReader
from lmx.data.record_formats import DataRecord
from lmx.data.tokenization import encode_all
from lmx.evaluation.gap_recovery import measure_per_sequence
from lmx.models.loader import load
from lmx.pipeline.quantize import rollback
from lmx.pipeline.quantize.calibration import CalibrationData
from tiny_runs import Run

QUANTIZE = {
    "bits": 2,
    "group_size": 32,
    "calibration": {"num_tokens": 512, "max_seq_length": 32, "num_eval_tokens": 128},
}


def quantize_facts(folder, base, **settings):
    run = Run(folder, {"quantize": QUANTIZE | settings}, model=base)
    assert run() == 0
    return run, run.json("manifest.json")["stages"]["1-quantize"]["result"]["facts"]


def test_eval_kl_covers_completions_only(tmp_path, base, monkeypatch):
    """With loss_on: completions, eval_kl is the KL over the validation completions."""
    calibration = QUANTIZE["calibration"] | {
        "loss_on": "completions",
        "num_eval_tokens": 10_000,
    }
    monkeypatch.setattr(rollback, "TOP_K", 10_000)
    settings = {"method": "gptq", "calibration": calibration}
    run, facts = quantize_facts(tmp_path, base, **settings)
    quantized = load(run.output / "stages/1-quantize/model")
    records = [*RecordReader(str(tmp_path / "valid.jsonl"), split="train")]
    examples = encode_all(records, quantized.tokenizer, max_seq_length=32).examples
    batches = BucketBatchSampler(
        examples, max_seq_length=32, batch_tokens=1024
    ).in_order()
    sums = measure_per_sequence(load(base).model, quantized.model, list(batches))
    expected = sums.kl.sum() / sums.tokens.sum()
    eval_kl = facts["eval_kl"]
    assert eval_kl[facts["selected_candidate"]] == pytest.approx(expected, rel=0.01)
    # The best candidate is kept, and no file of another one.
    assert list(eval_kl) == ["rtn", "gptq"]
    assert eval_kl[facts["selected_candidate"]] == min(eval_kl.values())
    assert "gptq: held-out KL" in run.log
    files = {path.name for path in (run.output / "stages/1-quantize").iterdir()}
    assert files == {"model"}


@pytest.mark.parametrize(
    ("settings", "candidates"),
    [
        ({"method": "rtn"}, None),
        ({"method": "gptq"}, ["rtn", "gptq"]),
        ({"method": "gptq", "rollback_if_worse": False}, None),
        ({"method": "awq"}, ["rtn", "awq"]),
    ],
)
def test_eval_kl_has_only_configured_candidates(tmp_path, base, settings, candidates):
    _, facts = quantize_facts(tmp_path, base, **settings)
    assert candidates == (list(facts["eval_kl"]) if candidates else None)
    assert ("eval_kl" in facts) == bool(candidates)


def test_kv_bits_are_in_the_checkpoint_and_reach_the_caches(tmp_path, base):
    """Of two layers, one gets 8 bits; a head has 32 channels, one group."""
    kv_cache = {"average_bits": 7, "candidate_bits": [4, 8]}
    run, facts = quantize_facts(tmp_path, base, method="rtn", kv_cache=kv_cache)
    folder = run.output / "stages/1-quantize/model"
    loaded = load(folder)
    bits = loaded.kv_bits
    assert sorted(bits) == [4, 8]
    assert bits == facts["kv_cache"]["bits"]
    generator = Model(loaded).generator()
    cache = generator.engine.new_cache()
    cache.forward(mx.array([[1, 2, 3]]))
    assert [layer.bits for layer in cache.caches] == bits
    mlx_lm_model, _ = mlx_lm.load(str(folder))
    cache = mlx_lm.models.cache.make_prompt_cache(mlx_lm_model)
    assert {type(layer).__name__ for layer in cache} == {"KVCache"}
    assert "KV cache: selected by layer" in run.log


def make_calibration_data(monkeypatch, train, valid, warnings, **keys):
    """Calibration data of sequences whose tokens are the record's number: one, or 8
    from 1000 on."""

    def windows(records, tokenizer, *, length, tokens, seed):
        numbers = np.array([int(record.text) for record in records], np.int32)
        widths = np.where(numbers < 1000, 1, 8)
        count = int(np.searchsorted(widths.cumsum(), tokens)) + 1
        numbers, widths = numbers[:count, None], widths[:count]
        if not len(numbers):
            raise TooFewTokens("too few")
        counted = np.arange(widths.max()) < widths[:, None]
        return CalibrationBatch(numbers * counted, counted)

    monkeypatch.setattr(
        "lmx.pipeline.quantize.calibration.concatenated_sequences", windows
    )
    records = {
        name: [DataRecord(str(n), text=str(n)) for n in numbers]
        for name, numbers in (train | {"valid": valid}).items()
    }
    rows = SimpleNamespace(sources=[*train], records=records.get)
    context = SimpleNamespace(
        rows=SimpleNamespace(train=rows, valid=records["valid"]),
        data=SimpleNamespace(train=["a"], valid=["b"] if valid else []),
        logger=SimpleNamespace(info=lambda _: None, warning=warnings.append),
        seed=0,
    )
    calibration = CalibrationConfig.model_construct(
        **{"dataset": [], "max_seq_length": 1, "num_eval_tokens": 3} | keys
    )
    return CalibrationData(calibration, context, None, holds_out=True)


@pytest.mark.parametrize("valid", [[], [100, 101], [2, 3, 4]])
def test_calibration_and_evaluation_tokens_are_disjoint(monkeypatch, valid):
    data = make_calibration_data(monkeypatch, {"a": range(20)}, valid, [])
    train_tokens = set(data.train_sequences(8).tokens.flatten().tolist())
    assert len(train_tokens) == 8
    eval_tokens = set(data.eval_sequences.tokens.flatten().tolist())
    assert eval_tokens
    assert not train_tokens & eval_tokens
    assert eval_tokens == set(valid) if valid else eval_tokens == {0, 1, 2}


def test_all_datasets_have_the_same_share_of_the_tokens(monkeypatch):
    warnings = []
    datasets = {"a": range(50), "short": [60, 61], "b": range(70, 90), "none": []}
    data = make_calibration_data(monkeypatch, datasets, [100, 101, 102], warnings)
    tokens = data.train_sequences(16).tokens.flatten().tolist()
    assert tokens == [0, 60, 70, 1, 61, 71, 2, 72, 3, 73]
    assert warnings == ["not calibrating on none: too few"]
    warnings.clear()
    # Without validation data, the first sequences of each dataset are held out.
    data = make_calibration_data(monkeypatch, datasets, [], warnings)
    assert data.eval_sequences.tokens.flatten().tolist() == [0, 60, 70]
    tokens = data.train_sequences(13).tokens.flatten().tolist()
    assert tokens == [1, 61, 71, 2, 72, 3, 73, 4, 74]
    assert len(warnings) == 1


def test_long_and_short_examples_are_held_out_in_equal_parts(monkeypatch):
    """Examples of 8 tokens and of one: tokens are shared out, not examples."""
    datasets = {"short": range(1, 900), "long": range(1000, 1900)}
    keys = {"max_seq_length": 8, "num_eval_tokens": 64}
    data = make_calibration_data(monkeypatch, datasets, [], [], **keys)
    parts = data.eval_sequences, data.train_sequences(160)
    for part, share in zip(parts, (32, 80), strict=True):
        is_long = part.tokens[:, 0] >= 1000
        assert [part[is_long].size, part[~is_long].size] == [share, share]
    held_out, trained = (set(part.tokens[:, 0].tolist()) for part in parts)
    assert not held_out & trained


def test_a_dataset_that_is_named_twice_is_read_once(monkeypatch):
    datasets = {"a": range(50), "b": range(70, 90)}
    data = make_calibration_data(monkeypatch, datasets, [], [])
    data.context.rows.train.sources.append("a")
    tokens = data.train_sequences(8).tokens.flatten().tolist()
    assert len(tokens) == len({*tokens}) == 8
