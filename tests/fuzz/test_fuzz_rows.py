"""Mutated dataset files are read, tokenized and batched, or refused with a message."""

import gzip
import json
import random
from contextlib import suppress

import pytest
from json_mutations import damage_bytes, mutate_json
from lmx.data.batching import BucketBatchSampler
from lmx.data.dataset import RecordReader
from lmx.data.preference import encode_pairs, encode_unpaired
from lmx.data.tokenization import encode_all, encode_block
from lmx.errors import UserError
from lmx.models.loader import load_tokenizer

USER = {"role": "user", "content": "How are you?"}
ANSWER = {"role": "assistant", "content": "Fine."}
CALL = {"name": "f", "arguments": "{}"}
ROWS = [
    {"messages": [USER, ANSWER, USER, ANSWER], "skill": "talk"},
    {
        "conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "gpt", "value": "x"},
        ]
    },
    {
        "messages": [USER, ANSWER | {"tool_calls": [{"function": CALL}]}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    },
    {"messages": [USER, ANSWER | {"weight": 0}, USER, ANSWER], "system": "Be brief."},
    {"prompt": "one plus", "completion": " two"},
    {"prompt": [USER], "completion": [ANSWER], "label": True},
    {"prompt": "one plus", "completion": " two", "label": False},
    {"prompt": "Hi", "chosen": "Hello", "rejected": "Go away"},
    {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER | {"content": "No."}]},
    {"prompt": "Hi", "chosen": "Hello", "rejected": "Go away", "system": "Be brief."},
    {"instruction": "Add", "input": "1 2", "output": "3"},
    {"text": "Once upon a time."},
]
ENCODERS = (encode_block, encode_pairs, encode_unpaired)


def damaged(rng: random.Random, data: bytes) -> bytes:
    return data if rng.random() < 0.6 else damage_bytes(rng, data)


def make_file(rng: random.Random, folder):
    """A file of a few rows, most of them mutated."""
    base = rng.choice(ROWS)
    rows = []
    for _ in range(rng.choice([1, 2, 5])):
        row = base if rng.random() < 0.3 else mutate_json(rng, base)
        if rng.random() < 0.3:
            # A value may be nested too deep to be copied again.
            with suppress(RecursionError):
                row = mutate_json(rng, row)
        rows.append(row)
    name = rng.choice(
        ["rows.jsonl", "rows.json", "rows.txt", "rows.jsonl.gz", "rows.csv"]
    )
    if name.endswith(".json"):
        text = json.dumps(rows)
    elif name.endswith(".txt"):
        text = "\n".join(str(row) for row in rows)
    else:
        text = "\n".join(json.dumps(row) for row in rows)
    data = damaged(rng, text.encode("utf-8", "surrogatepass"))
    path = folder / name
    path.write_bytes(damaged(rng, gzip.compress(data)) if name.endswith("gz") else data)
    return path


def read_and_batch(path, tokenizer, encode) -> int:
    """Read a file as a train stage does; returns the trained tokens of all batches."""
    records = list(RecordReader(str(path)))
    encoded = encode_all(records, tokenizer, max_seq_length=48, encode=encode)
    together = 1 if encode is encode_block else 2
    batches = BucketBatchSampler(
        encoded.examples,
        max_seq_length=48,
        batch_tokens=256,
        sequences_per_example=together,
    )
    return sum(batches(n).mask.sum().item() for n in range(batches.per_epoch))


def test_mutated_rows(num_cases, fuzz_random, tmp_path, tokenizer_folder):
    tokenizer, trained = load_tokenizer(tokenizer_folder), 0
    count = num_cases(200)
    for case in range(count):
        path = make_file(fuzz_random, tmp_path)
        encode = fuzz_random.choice(ENCODERS)
        try:
            trained += read_and_batch(path, tokenizer, encode) > 0
        except UserError as error:
            longest = max(map(len, str(error).splitlines()))
            assert longest <= 1000, f"case {case}: a line of {longest} characters"
        except Exception as error:
            head = path.read_bytes()[:2000]
            pytest.fail(f"case {case}: {encode.__name__} {error!r}\n{head}")
    assert 0 < trained < count
