"""Preference data: pairs of completions, and labelled completions for KTO."""

import numpy as np
import pytest
from lmx.data.batching import BucketBatchSampler
from lmx.data.dataset import RecordReader
from lmx.data.preference import encode_pairs, encode_unpaired
from lmx.data.record_formats import DataRecord
from lmx.data.tokenization import encode_block
from lmx.models.loader import load_tokenizer

SETTINGS = {"max_seq_length": 96, "loss_on": "completions"}


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return load_tokenizer(tokenizer_folder)


def turn(role: str, content: str) -> dict:
    return {"role": role, "content": content}


USER, ANSWER = turn("user", "How are you?"), turn("assistant", "Fine, thank you.")
AGAIN, GOOD = turn("user", "And now?"), turn("assistant", "Better.")
BAD = turn("assistant", "Worse than before.")


def texts(example, tokenizer) -> str:
    return tokenizer.decode(example.tokens[example.mask].tolist())


def test_pairs_are_interleaved_and_equal_single_encoding(tokenizer):
    record = DataRecord("f:1", prompt="one plus", completion=" two", rejected=" six")
    chosen, rejected = encode_pairs([record], tokenizer, **SETTINGS).examples
    for example, text in ((chosen, " two"), (rejected, " six")):
        alone = DataRecord("f:1", prompt="one plus", completion=text)
        [expected] = encode_block([alone], tokenizer, **SETTINGS).examples
        np.testing.assert_array_equal(example.tokens, expected.tokens)
        np.testing.assert_array_equal(example.mask, expected.mask)


def test_records_of_a_source_that_is_named_twice_count_twice(tokenizer):
    record = DataRecord("f:1", prompt="one plus", completion=" two", rejected=" six")
    incomplete = DataRecord("f:2", prompt="one plus", completion=" two")
    result = encode_pairs([record, incomplete] * 2, tokenizer, **SETTINGS)
    assert len(result.examples) == 4
    assert len(result.dropped) == 2


def read_pair(write, chosen, rejected) -> DataRecord:
    [record] = RecordReader(write([{"chosen": chosen, "rejected": rejected}]))
    return record


def test_shared_turns_are_part_of_the_prompt(write, tokenizer):
    shared = [USER, ANSWER, AGAIN]
    record = read_pair(write, [*shared, GOOD], [*shared, BAD])
    chosen, rejected = encode_pairs([record], tokenizer, **SETTINGS).examples
    assert texts(chosen, tokenizer) == "Better.<|im_end|>"
    assert texts(rejected, tokenizer) == "Worse than before.<|im_end|>"
    # Also when a train stage learns from the chosen completion.
    [alone] = encode_block([record], tokenizer, **SETTINGS).examples
    assert texts(alone, tokenizer) == "Better.<|im_end|>"


def test_different_earlier_turns_are_compared(write, tokenizer):
    other = turn("assistant", "Not well.")
    record = read_pair(write, [USER, ANSWER, AGAIN, GOOD], [USER, other, AGAIN, GOOD])
    chosen, rejected = encode_pairs([record], tokenizer, **SETTINGS).examples
    assert "Fine" in texts(chosen, tokenizer)
    assert "Not well." in texts(rejected, tokenizer)


def test_incomplete_pairs_are_dropped_whole(tokenizer):
    long = "word " * 90
    records = [
        DataRecord("f:1", prompt="a", completion="b"),
        DataRecord("f:2", prompt=long, completion="b", rejected="c"),
        DataRecord("f:3", prompt="a", completion="b", rejected="c"),
    ]
    result = encode_pairs(records, tokenizer, **SETTINGS)
    assert [example.where for example in result.examples] == ["f:3", "f:3"]
    assert dict(result.dropped).keys() == {"f:1", "f:2"}
    assert dict(result.dropped)["f:1"] == "it has no rejected completion"


def test_unpaired_examples_are_followed_by_another_completion(tokenizer):
    records = [
        DataRecord(f"f:{n}", prompt=f"{n} is ", completion=text, label=label)
        for n, text, label in ((1, "good", True), (2, "bad", False), (3, "so", True))
    ]
    result = encode_unpaired(records, tokenizer, **SETTINGS)
    assert [e.label for e in result.examples[::2]] == [True, False, True]
    for number, other in enumerate(("so", "good", "bad")):
        example, mismatched = result.examples[2 * number : 2 * number + 2]
        start = int(np.argmax(example.mask))
        np.testing.assert_array_equal(example.tokens[:start], mismatched.tokens[:start])
        assert other in texts(mismatched, tokenizer)


def test_undesirable_completions_are_not_fine_tuned_on(tokenizer):
    records = [
        DataRecord("f:1", prompt="a", completion="b", label=False),
        DataRecord("f:2", prompt="a", completion="b", label=True),
    ]
    result = encode_block(records, tokenizer, **SETTINGS)
    assert [example.where for example in result.examples] == ["f:2"]
    assert "label is false" in result.dropped[0][1]


@pytest.mark.parametrize("limit", [{"batch_size": 3}, {"batch_tokens": 200}])
def test_batches_keep_the_sequences_of_an_example_together(tokenizer, limit):
    records = [
        DataRecord(f"f:{n}", prompt="x" * n, completion="b", rejected="c" * (n % 7 + 1))
        for n in range(1, 12)
    ]
    examples = encode_pairs(records, tokenizer, **SETTINGS).examples
    batches = BucketBatchSampler(
        examples, max_seq_length=64, sequences_per_example=2, **limit
    )
    seen = []
    for number in range(batches.per_epoch):
        batch = batches(number)
        assert len(batch.tokens) % 2 == 0
        assert len(batch.tokens) <= 2 * limit.get("batch_size", 99)
        places = np.array(batch.where).reshape(-1, 2)
        assert (places[:, 0] == places[:, 1]).all()
        seen += list(places[:, 0])
    assert sorted(seen) == sorted(record.where for record in records)
    assert batches.num_examples == len(records)
