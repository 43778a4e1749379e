"""Tokens on disk: those of the rows, written in blocks, read one by one."""

import tracemalloc

import numpy as np
import pytest
from lmx.data import cache, token_store, tokenization
from lmx.data.batching import BucketBatchSampler
from lmx.data.record_formats import DataRecord
from lmx.errors import UserError
from lmx.models.loader import load_tokenizer

SETTINGS = {"max_seq_length": 24, "loss_on": "completions"}


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return load_tokenizer(tokenizer_folder)


def rows(count=60):
    """Texts of several windows, chats, and rows whose prompt is too long."""
    made = []
    for number in range(count):
        where = f"Straße.jsonl:{number + 1}"
        if number % 3 == 0:
            made.append(DataRecord(where, text=f"text {number} " * 9))
        else:
            prompt = "long " * 30 if number % 10 == 7 else f"say {number}"
            made.append(
                DataRecord(where, prompt=prompt, completion=f"{number} is said")
            )
    return made


def stored(rows, tokenizer, key="key", info=print, **settings):
    def fill(folder):
        return token_store.write_token_store(
            folder, rows, tokenizer, **SETTINGS | settings, info=info
        )

    return cache.get_or_create("tokens", key, fill, warning=print)


def test_stored_examples_equal_encoded_records(cache_folder, tokenizer, monkeypatch):
    expected = tokenization.encode_all(rows(), tokenizer, **SETTINGS)
    digests = set()
    for size in (1, 7, 1_000):
        monkeypatch.setattr(token_store, "BLOCK_RECORDS", size)
        kept = stored(iter(rows()), tokenizer, str(size))
        found = token_store.TokenStore(kept)
        assert len(found) == len(expected.examples) > 60
        assert found.lengths.tolist() == [len(e.tokens) for e in expected.examples]
        for index, example in enumerate(expected.examples):
            assert found[index].tokens.dtype == np.int32
            assert found[index].tokens.tolist() == example.tokens.tolist()
            assert found[index].mask.tolist() == example.mask.tolist()
            assert found[index].where == example.where
        facts = kept.facts
        assert facts["records"] == 60
        assert facts["tokens"] == found.lengths.sum()
        assert facts["truncated"] == expected.truncated
        assert facts["dropped"] == len(expected.dropped) > 0
        assert [*map(tuple, facts["first_dropped"])] == expected.dropped[:5]
        digests.add(found.digest)
    # How the rows were cut into blocks leaves no trace.
    assert len(digests) == 1


def test_digest_depends_on_tokens_masks_and_boundaries(cache_folder, tokenizer):
    digests = set()
    for number, settings in enumerate(({}, {"loss_on": "all"}, {"max_seq_length": 25})):
        digests.add(stored(rows(), tokenizer, str(number), **settings).facts["digest"])
    assert len(digests) == 3


def test_batches_from_disk_equal_those_from_memory(cache_folder, tokenizer):
    listed = tokenization.encode_all(rows(), tokenizer, **SETTINGS).examples
    settings = {"max_seq_length": 24, "batch_size": 4, "seed": 3}
    ours = BucketBatchSampler(
        token_store.TokenStore(stored(rows(), tokenizer)), **settings
    )
    theirs = BucketBatchSampler(listed, **settings)
    assert ours.per_epoch == theirs.per_epoch
    for step in range(2 * ours.per_epoch):
        assert np.array_equal(ours(step).tokens, theirs(step).tokens)
        assert np.array_equal(ours(step).mask, theirs(step).mask)
        assert ours(step).where == theirs(step).where


def test_store_without_trained_tokens_is_refused(cache_folder, tokenizer):
    long = [DataRecord(f"f:{n}", prompt="word " * 90, completion="x") for n in range(3)]
    with pytest.raises(UserError, match="nothing to train on: all 3 examples") as fault:
        stored(long, tokenizer)
    assert fault.value.hint == "raise data.max_seq_length"
    assert fault.value.place == "f:0"
    assert not [*cache_folder.rglob("*.values")]


def test_blocks_limit_characters(monkeypatch):
    monkeypatch.setattr(token_store, "BLOCK_CHARACTERS", 100)
    made = [DataRecord(f"f:{n}", text="x" * 60) for n in range(5)]
    assert [len(block) for block in token_store._blocks(made)] == [2, 2, 1]


def test_progress_is_logged(cache_folder, tokenizer, monkeypatch):
    monkeypatch.setattr(token_store, "SECONDS_BETWEEN_LOGS", 0.0)
    monkeypatch.setattr(token_store, "BLOCK_RECORDS", 30)
    said = []
    stored(rows(), tokenizer, info=said.append)
    assert [line.split(",")[0] for line in said] == [
        "tokenizing: 30 examples",
        "tokenizing: 60 examples",
    ]


def test_stored_records_are_not_held_in_memory(cache_folder, tokenizer, monkeypatch):
    """Python's and NumPy's memory; a plain encoder, so that it is soon done."""
    count = 200_000

    def encode(block, _, **settings):
        tokens, mask = np.arange(50, dtype=np.int32), np.arange(50) > 20
        return tokenization.EncodeResult(
            [tokenization.Example(tokens, mask, row.where) for row in block]
        )

    monkeypatch.setattr(token_store, "encode_block", encode)
    tracemalloc.start()
    kept = stored(
        (DataRecord(f"f:{n}", text="x" * 100) for n in range(count)), tokenizer
    )
    found = token_store.TokenStore(kept)
    batches = BucketBatchSampler(found, max_seq_length=64, batch_size=32)
    for step in range(40):
        batches(step)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == count
    # The tokens alone are 40 MB; lengths and the order of an epoch are 4 bytes each.
    assert peak < 16_000_000
