"""Preference data: pairs of completions, and labelled completions for KTO."""

import numpy as np
import pytest
from lmx.data.batching import BucketBatchSampler
from lmx.data.dataset import RecordReader
from lmx.data.preference import encode_pairs, encode_unpaired
from lmx.data.record_formats import DataRecord
from lmx.data.tokenization import encode_all, encode_block
from lmx.errors import UserError

SETTINGS = {"max_seq_length": 96, "loss_on": "completions"}


def turn(role: str, content: str) -> dict:
    return {"role": role, "content": content}


USER, ANSWER = turn("user", "How are you?"), turn("assistant", "Fine, thank you.")
AGAIN, GOOD = turn("user", "And now?"), turn("assistant", "Better.")
BAD = turn("assistant", "Worse than before.")
NAMED, SYSTEM = GOOD | {"name": "Ann"}, turn("system", "Be brief.")


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


LONG = "word " * 90
CHAT = (USER, ANSWER, AGAIN)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "a", "completion": "b"}, "it has no rejected completion"),
        ({"prompt": "a", "completion": LONG, "rejected": "b"}, "max_seq_length cuts"),
        ({"prompt": "a", "completion": "b", "rejected": LONG}, "max_seq_length cuts"),
        # They differ only where both are cut.
        ({"prompt": "a", "completion": LONG, "rejected": LONG + "x"}, "max_seq_length"),
        ({"prompt": LONG, "completion": "b", "rejected": "c"}, "max_seq_length cuts"),
        (
            {"messages": (*CHAT, turn("assistant", LONG)), "rejected": (*CHAT, BAD)},
            "cut",
        ),
        # The template does not write the name.
        ({"messages": (*CHAT, GOOD), "rejected": (*CHAT, NAMED)}, "are equal"),
        ({"messages": (USER, ANSWER), "rejected": (*CHAT, BAD)}, "one begins with the"),
    ],
)
def test_pairs_that_cannot_be_compared_are_dropped(record, reason, tokenizer):
    good = DataRecord("f:2", prompt="a", completion="b", rejected="c")
    records = [DataRecord("f:1", **record), good]
    result = encode_pairs(records, tokenizer, **SETTINGS)
    assert [example.where for example in result.examples] == ["f:2", "f:2"]
    [(where, text)] = result.dropped
    assert where == "f:1"
    assert reason in text


def test_completions_that_just_fit_are_whole(tokenizer):
    record = DataRecord("f:1", prompt="a", completion="b" * 20, rejected="c")
    chosen, _ = encode_pairs([record], tokenizer, **SETTINGS).examples
    length = int(np.flatnonzero(chosen.mask)[-1]) + 1
    limits = {length: 2, length - 1: 0}
    for limit, count in limits.items():
        settings = SETTINGS | {"max_seq_length": limit}
        result = encode_pairs([record], tokenizer, **settings)
        assert len(result.examples) == count
        labelled = [
            DataRecord(f"f:{n}", prompt=f"{n}", completion="b" * 20, label=True)
            for n in range(2)
        ]
        result = encode_unpaired(labelled, tokenizer, **settings)
        assert len(result.examples) == 2 * count
        assert len(result.dropped) == 2 - count
        assert all("max_seq_length cuts" in reason for _, reason in result.dropped)


def prompt_of(example) -> bytes:
    return example.tokens[: int(np.argmax(example.mask))].tobytes()


@pytest.mark.parametrize(
    "sizes",
    [(2,) * 6, (1, 1), (2, 1), (5, 1), (3, 1, 1, 1), (4, 2), (1, 4, 1), (2, 3, 2, 3)],
    ids=str,
)
def test_mismatched_completions_are_of_other_prompts(sizes, tokenizer):
    """Each completion is used once if no prompt has more than half of the examples."""
    prompts = [number for number, size in enumerate(sizes) for _ in range(size)]
    records = [
        DataRecord(f"f:{n}", prompt=f"{p} is", completion=f" c{n}.", label=n % 2 == 0)
        for n, p in enumerate(prompts)
    ]
    result = encode_unpaired(records, tokenizer, **SETTINGS)
    assert not result.dropped
    used = []
    for n, p in enumerate(prompts):
        example, mismatched = result.examples[2 * n : 2 * n + 2]
        assert prompt_of(example) == prompt_of(mismatched)
        text = texts(mismatched, tokenizer)
        used.append(int(text.partition("c")[2].partition(".")[0]))
        assert prompts[used[-1]] != p
    if 2 * max(sizes) <= len(prompts):
        assert sorted(used) == [*range(len(prompts))]


def test_examples_of_one_prompt_need_completions_of_others(tokenizer):
    records = [
        DataRecord(f"f:{n}", prompt="one", completion=f" {n}", label=n == 0)
        for n in range(3)
    ]
    result = encode_unpaired(records, tokenizer, **SETTINGS)
    assert result.examples == []
    assert [where for where, _ in result.dropped] == ["f:0", "f:1", "f:2"]
    assert "another prompt" in result.dropped[0][1]
    with pytest.raises(UserError, match="another prompt, which kto compares with"):
        encode_all(records, tokenizer, **SETTINGS, encode=encode_unpaired)
    other = DataRecord("g:1", prompt="two", completion=" lent", label=True)
    lent = encode_block([other], tokenizer, **SETTINGS).examples
    result = encode_unpaired(records, tokenizer, **SETTINGS, lent=lent)
    assert [e.where for e in result.examples[::2]] == ["f:0", "f:1", "f:2"]
    assert {texts(e, tokenizer)[:5] for e in result.examples[1::2]} == {" lent"}


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


@pytest.mark.parametrize(
    ("good", "bad"), [(True, False), (1, 0), ("true", "False"), (1.0, 0.0), ("1", "0")]
)
@pytest.mark.parametrize("key", ["label", "kto_tag", "desirable"])
def test_labels_of_other_tools_are_read(write, key, good, bad):
    rows = [{"prompt": "a", "completion": "b", key: label} for label in (good, bad)]
    reader = RecordReader(write([*rows, rows[0] | {key: None}]))
    assert reader.format == "unpaired_preference"
    assert [record.label for record in reader] == [True, False]


@pytest.mark.parametrize("label", [-1, "bad", 2])
def test_labels_of_another_scale_refuse_the_source(write, label):
    """To skip these examples alone would train the good completions only."""
    rows = [{"prompt": "a", "completion": "b", "label": x} for x in (1, label)]
    path = write(rows)
    with pytest.raises(UserError, match="is not true, false, 1 or 0") as error:
        list(RecordReader(path))
    assert error.value.place == f"{path}:2"


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
