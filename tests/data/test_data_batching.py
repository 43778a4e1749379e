"""Batches hold every example once per epoch, in few shapes, by seed and step."""

from collections import Counter
from functools import partial
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from lmx.data.batching import (
    Batch,
    BucketBatchSampler,
    InMemoryExamples,
    bucket_lengths,
    rows_of,
)
from lmx.data.packing import PackedBatchSampler, pack
from lmx.data.tokenization import Example

LONGEST = 100


def examples(count=300, longest=LONGEST, *, seed=0):
    """Make examples. The first token of example i is i + 1, which identifies it."""
    generator = np.random.default_rng(seed)
    result = []
    for index in range(count):
        length = int(generator.integers(2, longest + 1))
        tokens = generator.integers(1000, 2000, length).astype(np.int32)
        tokens[0] = index + 1
        mask = generator.random(length) < 0.5
        mask[0], mask[-1] = False, True
        result.append(Example(tokens, mask, f"f:{index + 1}"))
    return result


def batches(**settings):
    settings = {"max_seq_length": LONGEST, "batch_size": 8} | settings
    return BucketBatchSampler(settings.pop("examples", None) or examples(), **settings)


def naive_order(sampler, *, batch_size, seed, epoch):
    """The examples of every step of an epoch, by lists in place of offsets."""
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    lengths = bucket_lengths(LONGEST)
    buckets = {length: [] for length in reversed(lengths)}
    for index, inputs in enumerate(sampler.examples.lengths - 1):
        buckets[next(n for n in lengths if n >= inputs)].append(index)
    items = [i for b in buckets.values() if b for i in generator.permutation(b)]
    steps = -(-len(items) // batch_size)
    cuts = [len(items) * step // steps for step in range(steps + 1)]
    ordered = [items[start:end] for start, end in pairwise(cuts)]
    return [ordered[step] for step in generator.permutation(steps)]


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("batch_size", [8, 7, 1000])
def test_batches_equal_a_naive_implementation(batch_size, seed):
    """The documented results depend on this order."""
    sampler = batches(seed=seed, batch_size=batch_size)
    for epoch in (0, 1, 5):
        expected = naive_order(sampler, batch_size=batch_size, seed=seed, epoch=epoch)
        assert len(expected) == sampler.per_epoch
        for number, members in enumerate(expected):
            batch = sampler(epoch * sampler.per_epoch + number)
            assert list(batch.example_indices) == members


# Batch size and batches per step, which make the same steps.
HALVED = [(8, 1), (4, 2), (2, 4), (1, 8)]


def steps_of(make, count, accumulation):
    """The examples of every step in two epochs, and the sizes of all batches."""
    sampler = make(accumulation)
    steps, sizes = [], set()
    for step in range(count * sampler.steps_per_epoch):
        indices = sampler.indices(step)
        assert 1 <= len(indices) <= accumulation
        step_batches = [sampler(index) for index in indices]
        assert all(batch.example_indices for batch in step_batches)
        sizes |= {len(batch.mask) for batch in step_batches}
        steps.append(sorted(i for b in step_batches for i in b.example_indices))
    return steps, sizes


@pytest.mark.parametrize("count", [1, 3, 8, 9, 17, 100])
@pytest.mark.parametrize("packing", [False, True])
def test_half_the_batch_and_twice_the_accumulation_make_the_same_steps(count, packing):
    dataset = examples(count)
    plan = pack(InMemoryExamples(dataset).lengths, LONGEST + 1)

    def make(batch_size, accumulation):
        sizes = {"batch_size": batch_size, "accumulation": accumulation}
        if packing:
            data = InMemoryExamples(dataset)
            return PackedBatchSampler(data, plan, max_seq_length=LONGEST, **sizes)
        return batches(examples=dataset, **sizes)

    expected, _ = steps_of(partial(make, 8), 3, 1)
    assert sorted(i for step in expected for i in step) == sorted(3 * [*range(count)])
    for batch_size, accumulation in HALVED:
        steps, sizes = steps_of(partial(make, batch_size), 3, accumulation)
        assert steps == expected
        assert max(sizes) <= batch_size
    # Negative control: another size of the steps.
    assert count <= 8 or steps_of(partial(make, 4), 3, 1)[0] != expected


@pytest.mark.parametrize("accumulation", [1, 2, 5])
def test_accumulated_batches_of_tokens_hold_every_example_once(accumulation):
    sizes = {"batch_size": None, "batch_tokens": 256, "accumulation": accumulation}
    sampler = batches(**sizes)
    steps, _ = steps_of(lambda _: sampler, 2, accumulation)
    assert Counter(i for step in steps for i in step) == Counter(2 * [*range(300)])
    shapes = [batch.mask.shape for batch in sampler.in_order()]
    assert all(rows * length <= 256 for rows, length in shapes)
    assert sampler.steps_per_epoch <= sampler.per_epoch == len(shapes)


def sequences_with_examples(batch):
    """Return (tokens, mask) of the sequences that hold an example."""
    pairs = zip(np.array(batch.tokens), np.array(batch.mask), strict=True)
    return [(tokens, mask) for tokens, mask in pairs if tokens[0]]


def test_sequences_hold_their_example_and_mask():
    dataset = examples()
    sampler = batches(examples=dataset)
    for step in range(sampler.per_epoch):
        batch = sampler(step)
        assert [
            dataset[t[0] - 1].where for t, _ in sequences_with_examples(batch)
        ] == list(batch.where)
        for tokens, mask in sequences_with_examples(batch):
            example = dataset[tokens[0] - 1]
            count = len(example.tokens)
            assert tokens[:count].tolist() == example.tokens.tolist()
            assert not tokens[count:].any()
            # mask[i] belongs to the target tokens[i + 1].
            trained = tokens[1:][mask]
            assert trained.tolist() == example.tokens[example.mask].tolist()


def test_filler_sequences_are_untrained():
    for batch in batches().in_order():
        tokens, mask = np.array(batch.tokens), np.array(batch.mask)
        assert mask.shape == (len(tokens), tokens.shape[1] - 1)
        empty = tokens[:, 0] == 0
        assert not mask[empty].any()
        assert mask[~empty].any(axis=1).all()
        assert (~empty).sum() == len(batch.where)


def test_batch_depends_on_seed_and_step_only():
    sequential, random_access = batches(seed=3), batches(seed=3)
    order = [7, 100, 0, 99, 7, 3]
    expected = {step: random_access(step) for step in order}
    for step in range(101):
        batch = sequential(step)
        if step in expected:
            assert np.array_equal(batch.tokens, expected[step].tokens)
            assert np.array_equal(batch.mask, expected[step].mask)


def test_bucket_has_one_shape():
    sampler = batches()
    shapes = {sampler(step).tokens.shape for step in range(sampler.per_epoch)}
    assert len(shapes) == len({length for _, length in shapes})
    assert {length - 1 for _, length in shapes} <= set(bucket_lengths(LONGEST))


@pytest.mark.parametrize("longest", [8, 15, 16, 17, 64, 100, 511, 512, 4096])
def test_bucket_lengths_grow_by_half_at_most(longest):
    lengths = bucket_lengths(longest)
    assert lengths[-1] == longest
    assert lengths == sorted(set(lengths))
    assert lengths[0] <= 16
    assert all(high <= 1.5 * low for low, high in pairwise(lengths))


@pytest.mark.parametrize(
    "sizes", [{"batch_size": 8}, {"batch_size": None, "batch_tokens": 512}]
)
def test_at_most_a_third_of_a_sequence_is_padding(sizes):
    sampler, mixed = batches(**sizes), 0
    for batch in sampler.in_order():
        short = [
            np.count_nonzero(tokens) - 1 <= 2 / 3 * batch.mask.shape[1] - 1
            for tokens, _ in sequences_with_examples(batch)
        ]
        # Shorter examples follow where those of one length do not fill a batch.
        assert not short[0] or batch.mask.shape[1] <= 16
        mixed += any(short) and batch.mask.shape[1] > 16
    assert mixed < len(sampler.shapes)


@pytest.mark.parametrize("count", [1, 2, 8, 9, 17, 33])
@pytest.mark.parametrize("batch_size", [1, 8, 10_000])
def test_small_dataset_is_not_padded_to_a_full_batch(count, batch_size):
    dataset = [
        Example(np.full(10, i + 1, np.int32), np.arange(10) > 4, f"f:{i + 1}")
        for i in range(count)
    ]
    sampler = batches(examples=dataset, batch_size=batch_size)
    assert sampler.per_epoch == -(-count // batch_size)
    sizes = {len(batch.mask) for batch in sampler.in_order()}
    assert len(sizes) == 1
    [size] = sizes
    assert size <= batch_size
    # There is less than one filler sequence per batch.
    assert size * sampler.per_epoch - count < sampler.per_epoch


def test_tokens_limit_the_batch():
    sampler = batches(batch_size=None, batch_tokens=256)
    shapes = {batch.mask.shape for batch in sampler.in_order()}
    assert all(size * length <= 256 for size, length in shapes)
    # Batches of short sequences are larger.
    assert [size for size, _ in sorted(shapes, key=lambda s: s[1])] == sorted(
        (size for size, _ in shapes), reverse=True
    )
    assert max(size * length for size, length in shapes) > 192


def test_sequence_above_the_token_limit_is_alone():
    sampler = batches(batch_size=None, batch_tokens=20)
    assert {b.mask.shape[0] for b in sampler.in_order() if b.mask.shape[1] > 20} == {1}


def test_in_order_covers_every_example_once():
    sampler = batches()
    places = [place for batch in sampler.in_order() for place in batch.where]
    assert sorted(places) == sorted(e.where for e in sampler.examples)
    repeated = [place for batch in sampler.in_order() for place in batch.where]
    assert places == repeated


def test_first_batches_in_order_have_every_length():
    sampler = batches()
    first_batches = list(sampler.in_order(len(sampler.shapes)))
    assert len(first_batches) == len(sampler.shapes) > 4
    assert len({batch.mask.shape[1] for batch in first_batches}) == len(sampler.shapes)


def test_lengths_at_bucket_edges_fit():
    dataset = [
        Example(np.arange(1, n + 1, dtype=np.int32), np.arange(n) == n - 1, f"f:{n}")
        for n in range(2, 66)
    ]
    sampler = BucketBatchSampler(dataset, max_seq_length=65, batch_size=4)
    for batch in sampler.in_order():
        for tokens, mask in sequences_with_examples(batch):
            length = np.count_nonzero(tokens)
            assert np.flatnonzero(mask).tolist() == [length - 2]


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 9])
def test_rows_of_a_batch_are_its_sequences(parts):
    rows, length = 5, 8
    numbers = mx.arange(rows * length).reshape(rows, length)
    batch = Batch(
        mx.arange(rows * (length + 1)).reshape(rows, length + 1),
        numbers % 2 == 0,
        tuple("abcde"),
        documents=numbers,
        example_indices=tuple(range(rows)),
        target=(numbers, numbers[:, :1]),
    )
    pieces = list(rows_of(batch, parts))
    assert len(pieces) == min(parts, rows)
    for name in ("tokens", "mask", "documents"):
        joined = mx.concatenate([getattr(piece, name) for piece in pieces])
        assert mx.array_equal(joined, getattr(batch, name))
    for number, target in enumerate(batch.target):
        joined = mx.concatenate([piece.target[number] for piece in pieces])
        assert mx.array_equal(joined, target)
    assert "".join(name for piece in pieces for name in piece.where) == "abcde"
    indices = [index for piece in pieces for index in piece.example_indices]
    assert indices == [*range(rows)]
