"""Calibration sequences: concatenated records, or one example with its loss mask."""

from functools import partial

import numpy as np
import pytest
from lmx.data.calibration import (
    CalibrationBatch,
    concatenated_sequences,
    per_example_sequences,
)
from lmx.data.record_formats import DataRecord
from lmx.data.tokenization import encode_all
from lmx.errors import UserError

SETTINGS = {"length": 64, "seed": 0}


def make_records(count):
    return [
        DataRecord(
            f"rows:{n}", prompt=f"question {n} " * (1 + n % 3), completion=f"answer {n}"
        )
        for n in range(count)
    ]


def test_concatenated_sequences_are_full(tokenizer):
    batch = concatenated_sequences(
        make_records(40), tokenizer, tokens=200, length=32, seed=3
    )
    assert batch.tokens.shape == (6, 32)
    assert batch.counted.all()
    assert batch.seen.all()
    assert batch.size == 6 * 32


def test_per_example_sequences_equal_training_examples(tokenizer):
    records = make_records(8)
    settings = SETTINGS | {"loss_on": "completions"}
    batch = per_example_sequences(records, tokenizer, tokens=10_000, **settings)
    examples = encode_all(records, tokenizer, max_seq_length=64).examples
    assert len(batch) == len(examples)
    expected = {tuple(e.tokens.tolist()): e.mask.tolist() for e in examples}
    for tokens, counted in zip(batch.tokens, batch.counted, strict=True):
        (expected_tokens,) = [
            k for k in expected if tuple(tokens[: len(k)].tolist()) == k
        ]
        # The prediction of a token is at the position before it.
        assert [False, *counted[: len(expected_tokens) - 1].tolist()] == expected[
            expected_tokens
        ]
        assert not counted[len(expected_tokens) - 1 :].any()
        assert counted.any()
        assert not counted.all()


def test_batches_in_turn_are_padded_to_one_length():
    shapes = ((2, 3), (1, 5), (3, 2))
    batches = [
        CalibrationBatch(np.full(shape, 10 + n), np.ones(shape, bool))
        for n, shape in enumerate(shapes)
    ]
    joined = CalibrationBatch.in_turn(batches)
    assert joined.tokens[:, 0].tolist() == [10, 11, 12, 10, 12, 12]
    assert joined.counted.sum(axis=1).tolist() == [3, 5, 2, 3, 2, 2]
    assert joined.tokens.shape == joined.counted.shape == (6, 5)


def test_per_example_sequences_with_loss_on_all(tokenizer):
    records = make_records(5)
    settings = SETTINGS | {"loss_on": "all"}
    batch = per_example_sequences(records, tokenizer, tokens=10_000, **settings)
    lengths = [
        len(e.tokens)
        for e in encode_all(
            records, tokenizer, max_seq_length=64, loss_on="all"
        ).examples
    ]
    assert sorted(batch.counted.sum(axis=1).tolist()) == sorted(n - 1 for n in lengths)


def test_per_example_sequences_reach_the_token_count(tokenizer):
    settings = SETTINGS | {"loss_on": "completions"}
    full = per_example_sequences(make_records(30), tokenizer, tokens=10_000, **settings)
    partial = per_example_sequences(make_records(30), tokenizer, tokens=100, **settings)
    assert len(full) == 30
    assert 1 < len(partial) < 30
    assert partial.size + len(partial) >= 100
    assert partial[:-1].size + len(partial) - 1 < 100
    other_seed = per_example_sequences(
        make_records(30), tokenizer, tokens=100, **settings | {"seed": 4}
    )
    assert not np.array_equal(partial.tokens[0], other_seed.tokens[0])


@pytest.mark.parametrize(
    "sample",
    [concatenated_sequences, partial(per_example_sequences, loss_on="completions")],
    ids=["concatenated", "per_example"],
)
def test_sequences_depend_on_the_seed_only(tokenizer, sample):
    """A seed of 0 is a seed: mlx-lm #1661."""
    first, again, other = (
        sample(make_records(30), tokenizer, tokens=128, length=32, seed=seed).tokens
        for seed in (0, 0, 1)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_examples_without_completion_are_refused(tokenizer):
    records = [DataRecord("rows:1", prompt="long " * 80, completion="never seen")]
    with pytest.raises(UserError, match="no calibration example has a completion"):
        per_example_sequences(
            records, tokenizer, tokens=100, **SETTINGS | {"loss_on": "completions"}
        )


def test_seen_ends_at_the_last_counted_position():
    counted = np.array([[0, 1, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]], bool)
    batch = CalibrationBatch(np.zeros((3, 5), np.int32), counted)
    assert batch.seen.tolist() == [
        [True, True, True, True, False],
        [True] + [False] * 4,
        [False] * 5,
    ]
    assert batch.size == 5


def test_parts_of_one_length_keep_the_order():
    tokens = np.arange(7 * 4, dtype=np.int32).reshape(7, 4)
    windows = CalibrationBatch(tokens, np.ones(tokens.shape, bool))
    parts = windows.parts(9)
    assert [len(part) for part in parts] == [2, 2, 2, 1]
    assert np.array_equal(np.concatenate([p.tokens for p in parts]), tokens)


def test_parts_of_many_lengths_have_little_padding():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, 50)
    tokens = rng.integers(1, 1000, (50, 40)).astype(np.int32)
    counted = np.arange(40) == lengths[:, None] - 1
    parts = CalibrationBatch(tokens, counted).parts(100)
    assert sum(part.size for part in parts) == lengths.sum()
    assert sum(part.tokens.size for part in parts) < 1.2 * lengths.sum()
    assert all(part.tokens.size <= 100 for part in parts)
    actual = [
        tuple(sequence[seen].tolist())
        for part in parts
        for sequence, seen in zip(part.tokens, part.seen, strict=True)
    ]
    expected = [
        tuple(sequence[:n].tolist())
        for sequence, n in zip(tokens, lengths, strict=True)
    ]
    assert sorted(actual) == sorted(expected)
    widths = [part.tokens.shape[1] for part in parts]
    assert widths not in (sorted(widths), sorted(widths)[::-1])
