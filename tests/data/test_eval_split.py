"""The evaluation split depends on seed and position only and loses no record."""

import random
import tracemalloc

import pytest
from lmx.data import cache, splits
from lmx.data.record_formats import DataRecord
from lmx.data.splits import (
    EVAL_SHARE,
    choose_eval_records,
    num_held_out,
    random_u64,
)
from lmx.errors import UserError


def records(count):
    return [DataRecord(f"f:{n}", prompt=str(n), completion="x") for n in range(count)]


@pytest.mark.parametrize("seed", [0, 2**40])
@pytest.mark.parametrize("limit", [1, 2, 10, 2_000])
@pytest.mark.parametrize("count", [2, 3, 7, 50, 1_000])
def test_every_record_is_in_one_part(count, limit, seed):
    all_records = records(count)
    split = choose_eval_records(all_records, seed, limit)
    remaining = list(split.remaining(all_records, seed))
    together = sorted(remaining + split.records, key=lambda record: int(record.prompt))
    assert together == all_records
    assert 1 <= len(split.records) <= min(limit, count - 1)
    assert choose_eval_records(iter(all_records), seed, limit) == split


@pytest.mark.parametrize(
    ("count", "held"), [(2, 1), (19, 1), (40, 4), (200, 20), (499, 49), (900, 50)]
)
def test_small_source_holds_out_up_to_twice_the_share(count, held):
    for seed in range(5):
        chosen = choose_eval_records(records(count), seed).records
        order = sorted(range(count), key=lambda index: random_u64(seed, index))
        below = sum(random_u64(seed, n) < EVAL_SHARE * 2**64 for n in order)
        size = max(held, min(below, count - 1))
        assert {record.where for record in chosen} == {f"f:{n}" for n in order[:size]}


@pytest.mark.parametrize("limit", [3, 30, 2_000])
def test_held_out_records_have_the_lowest_random_numbers(limit):
    """The reference sorts all records."""
    count, seed = 2_000, 5
    order = sorted(range(count), key=lambda index: random_u64(seed, index))
    below = sum(random_u64(seed, index) < EVAL_SHARE * 2**64 for index in range(count))
    expected = {f"f:{index}" for index in order[: min(limit, below)]}
    assert {
        record.where
        for record in choose_eval_records(records(count), seed, limit).records
    } == expected


def test_two_records_below_the_share_are_not_both_held_out():
    low = 0.05 * 2**64
    seed = next(
        s for s in range(10**6) if random_u64(s, 0) < low and random_u64(s, 1) < low
    )
    assert len(choose_eval_records(records(2), seed).records) == 1


def test_share_is_about_five_percent_and_depends_on_seed():
    all_records = records(20_000)
    first, second = (choose_eval_records(all_records, seed).records for seed in (0, 1))
    assert 900 < len(first) < 1_100
    common = {record.where for record in first} & {record.where for record in second}
    assert len(common) < 100


def test_random_u64_is_splitmix64():
    """SplitMix64 starts with this published number for seed 0."""
    state = 0xE220A8397B1DCDAF
    assert random_u64(0, 0) != random_u64(0, 1) != random_u64(1, 0)
    assert random_u64(0, 0) == _mix((state + 0x9E3779B97F4A7C15) % 2**64)
    assert len({random_u64(9, index) for index in range(10_000)}) == 10_000


def _mix(value):
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def test_single_document_gives_its_tail():
    text = "".join(f"line {n}\n" for n in range(100))
    document = [DataRecord("f:1", text=text)]
    split = choose_eval_records(document, 0)
    [head], [tail] = split.remaining(document, 0), split.records
    assert head.text + tail.text == text
    assert tail.text.startswith("line ")
    assert 0.03 < len(tail.text) / len(text) < 0.08
    with pytest.raises(UserError, match="none can be held out"):
        choose_eval_records(records(1), 0)


def test_records_are_not_held_in_memory():
    def generate():
        for number in range(6_000):
            yield DataRecord(
                f"f:{number}", text=random.Random(number).randbytes(500).hex()
            )

    tracemalloc.start()
    split = choose_eval_records(generate(), 0, 100)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(split.records) == 100
    # All records together are 6 MB.
    assert peak < 1_000_000


def test_records_survive_the_cache(cache_folder):
    turns = ({"role": "user", "content": "é\u2028", "tool_calls": [{"a": 1}]},)
    split = splits.EvalSplit(
        [DataRecord("f:1", messages=turns, skill="s"), DataRecord("f:2", text="b\n")],
        2**64 - 1,
    )
    entry = cache.store(print).get_or_make(
        "test", "k", lambda f: splits.write_eval_split(f, split)
    )
    assert splits.read_eval_split(entry) == split


@pytest.mark.parametrize("count", [2, 8, 200, 700, 3000, 60000])
def test_a_dry_run_knows_how_many_are_held_out(count):
    held = len(choose_eval_records(records(count), 0).records)
    assert held == pytest.approx(num_held_out(count), rel=0.15, abs=1)
