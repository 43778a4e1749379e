"""Tokens on disk: written in blocks, read example by example."""

import tracemalloc

import numpy as np
import pytest
from lmx.data import cache, token_store, tokenization
from lmx.data.batching import BucketBatchSampler
from lmx.data.record_formats import DataRecord
from lmx.errors import UserError

SETTINGS = {"max_seq_length": 24, "loss_on": "completions"}


def make_records(count=60):
    """Make long texts, completions, and records with too long a prompt."""
    records = []
    for number in range(count):
        where = f"Straße.jsonl:{number + 1}"
        if number % 3 == 0:
            records.append(DataRecord(where, text=f"text {number} " * 9))
        else:
            prompt = "long " * 30 if number % 10 == 7 else f"say {number}"
            records.append(
                DataRecord(where, prompt=prompt, completion=f"{number} is said")
            )
    return records


def write_store(make_records, tokenizer, key="key", info=print, **settings):
    def fill(folder):
        return token_store.write_token_store(
            folder, make_records, tokenizer, **SETTINGS | settings, info=info
        )

    return cache.store(print).get_or_make("tokens", key, fill)


def test_stored_examples_equal_encoded_records(cache_folder, tokenizer, monkeypatch):
    expected = tokenization.encode_all(make_records(), tokenizer, **SETTINGS)
    digests = set()
    for size in (1, 7, 1_000):
        monkeypatch.setattr(token_store, "BLOCK_RECORDS", size)
        entry = write_store(iter(make_records()), tokenizer, str(size))
        store = token_store.TokenStore(entry)
        assert len(store) == len(expected.examples) > 60
        assert store.lengths.tolist() == [len(e.tokens) for e in expected.examples]
        for index, example in enumerate(expected.examples):
            assert store[index].tokens.dtype == np.int32
            assert store[index].tokens.tolist() == example.tokens.tolist()
            assert store[index].mask.tolist() == example.mask.tolist()
            assert store[index].where == example.where
        facts = entry.facts
        assert facts["records"] == 60
        assert facts["tokens"] == store.lengths.sum()
        assert facts["truncated"] == expected.truncated
        assert facts["dropped"] == len(expected.dropped) > 0
        assert [*map(tuple, facts["first_dropped"])] == expected.dropped[:5]
        digests.add(store.digest)
    # The block size does not change the store.
    assert len(digests) == 1


def test_digest_depends_on_tokens_masks_and_boundaries(cache_folder, tokenizer):
    digests = set()
    for number, settings in enumerate(({}, {"loss_on": "all"}, {"max_seq_length": 25})):
        digests.add(
            write_store(make_records(), tokenizer, str(number), **settings).facts[
                "digest"
            ]
        )
    assert len(digests) == 3


def test_batches_from_disk_equal_those_from_memory(cache_folder, tokenizer):
    examples = tokenization.encode_all(make_records(), tokenizer, **SETTINGS).examples
    settings = {"max_seq_length": 24, "batch_size": 4, "seed": 3}
    from_disk = BucketBatchSampler(
        token_store.TokenStore(write_store(make_records(), tokenizer)), **settings
    )
    from_memory = BucketBatchSampler(examples, **settings)
    assert from_disk.per_epoch == from_memory.per_epoch
    for step in range(2 * from_disk.per_epoch):
        assert np.array_equal(from_disk(step).tokens, from_memory(step).tokens)
        assert np.array_equal(from_disk(step).mask, from_memory(step).mask)
        assert from_disk(step).where == from_memory(step).where


def test_store_without_trained_tokens_is_refused(cache_folder, tokenizer):
    long_records = [
        DataRecord(f"f:{n}", prompt="word " * 90, completion="x") for n in range(3)
    ]
    with pytest.raises(UserError, match="nothing to train on: all 3 examples") as fault:
        write_store(long_records, tokenizer)
    assert fault.value.hint == "raise data.max_seq_length"
    assert fault.value.place == "f:0"
    assert not [*cache_folder.rglob("*.values")]


def test_blocks_limit_characters(monkeypatch):
    monkeypatch.setattr(tokenization, "BLOCK_CHARACTERS", 100)
    blocks = [len(block) for block in tokenization.in_blocks(["x" * 60] * 5, len)]
    assert blocks == [2, 2, 1]
    blocks = [len(block) for block in tokenization.in_blocks(["x"] * 5, len, 3)]
    assert blocks == [3, 2]


def test_progress_is_logged(cache_folder, tokenizer, monkeypatch):
    monkeypatch.setattr(token_store, "SECONDS_BETWEEN_LOGS", 0.0)
    monkeypatch.setattr(token_store, "BLOCK_RECORDS", 30)
    messages = []
    write_store(make_records(), tokenizer, info=messages.append)
    assert [line.split(",")[0] for line in messages] == [
        "tokenizing: 30 examples",
        "tokenizing: 60 examples",
    ]


def test_stored_records_are_not_held_in_memory(cache_folder, tokenizer, monkeypatch):
    """Measures the memory of Python and NumPy. A trivial encoder makes it fast."""
    count = 20_000

    def encode(block, _, **settings):
        tokens, mask = np.arange(50, dtype=np.int32), np.arange(50) > 20
        return tokenization.EncodeResult(
            [tokenization.Example(tokens, mask, record.where) for record in block]
        )

    monkeypatch.setattr(token_store, "encode_block", encode)
    tracemalloc.start()
    entry = write_store(
        (DataRecord(f"f:{n}", text="x" * 100) for n in range(count)), tokenizer
    )
    store = token_store.TokenStore(entry)
    batches = BucketBatchSampler(store, max_seq_length=64, batch_size=32)
    for step in range(40):
        batches(step)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(store) == count
    # Tokens need 4 MB. Lengths and the epoch order need 4 bytes per example each.
    assert peak < 2_000_000
