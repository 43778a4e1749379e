"""Batches: every example once an epoch, by seed and step alone, in few shapes."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from lmx.data.batching import BucketBatchSampler, bucket_lengths
from lmx.data.tokenization import Example

LONGEST = 100


def examples(count=300, longest=LONGEST, *, seed=0):
    """Example i has a token i + 1 first, so that its rows can be told apart."""
    generator = np.random.default_rng(seed)
    found = []
    for index in range(count):
        length = int(generator.integers(2, longest + 1))
        tokens = generator.integers(1000, 2000, length).astype(np.int32)
        tokens[0] = index + 1
        mask = generator.random(length) < 0.5
        mask[0], mask[-1] = False, True
        found.append(Example(tokens, mask, f"f:{index + 1}"))
    return found


def batches(**settings):
    settings = {"max_seq_length": LONGEST, "batch_size": 8} | settings
    return BucketBatchSampler(settings.pop("examples", None) or examples(), **settings)


class Former(BucketBatchSampler):
    """The plan of batches with a tuple for every batch, as it is easiest to read."""

    def __call__(self, step):
        epoch, position = divmod(step, self.per_epoch)
        generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
        plan = []
        for length, size, members in self.buckets:
            order = generator.permutation(members.astype(np.int64))
            plan += [
                (length, size, order[start : start + size])
                for start in range(0, len(order), size)
            ]
        plan = [plan[i] for i in generator.permutation(len(plan))]
        return self._collate(*plan[position])


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize(
    "sizes", [{"batch_size": 8}, {"batch_size": None, "batch_tokens": 512}]
)
def test_batches_equal_a_naive_implementation(sizes, seed):
    """The figures that are documented rest on this order."""
    new = batches(seed=seed, **sizes)
    old = Former(
        examples(), seed=seed, max_seq_length=LONGEST, **{"batch_size": 8} | sizes
    )
    for step in [*range(new.per_epoch + 3), 5 * new.per_epoch]:
        for ours, theirs in zip(
            new(step).arrays[:2], old(step).arrays[:2], strict=True
        ):
            assert np.array_equal(ours, theirs)
        assert new(step).where == old(step).where


def rows(batch):
    """(tokens, mask) of the rows that hold an example."""
    pairs = zip(np.array(batch.tokens), np.array(batch.mask), strict=True)
    return [(tokens, mask) for tokens, mask in pairs if tokens[0]]


@pytest.mark.parametrize(
    "sizes", [{"batch_size": 8}, {"batch_size": None, "batch_tokens": 512}]
)
def test_epoch_holds_every_example_once(sizes):
    cut = batches(**sizes)
    for epoch in range(3):
        steps = range(epoch * cut.per_epoch, (epoch + 1) * cut.per_epoch)
        seen = Counter(t[0] for step in steps for t, _ in rows(cut(step)))
        assert seen == Counter(range(1, 301))


def test_sequences_hold_their_example_and_mask():
    made = examples()
    cut = batches(examples=made)
    for step in range(cut.per_epoch):
        batch = cut(step)
        assert [made[t[0] - 1].where for t, _ in rows(batch)] == list(batch.where)
        for tokens, mask in rows(batch):
            example = made[tokens[0] - 1]
            count = len(example.tokens)
            assert tokens[:count].tolist() == example.tokens.tolist()
            assert not tokens[count:].any()
            # mask[i] is of the target tokens[i + 1].
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
    straight, jumping = batches(seed=3), batches(seed=3)
    order = [7, 100, 0, 99, 7, 3]
    found = {step: jumping(step) for step in order}
    for step in range(101):
        batch = straight(step)
        if step in found:
            assert np.array_equal(batch.tokens, found[step].tokens)
            assert np.array_equal(batch.mask, found[step].mask)


def order_of(cut, epoch=0):
    start = epoch * cut.per_epoch
    return [cut(start + step).where for step in range(cut.per_epoch)]


def test_epochs_and_seeds_differ():
    first, second = order_of(batches(seed=1)), order_of(batches(seed=1), 1)
    assert first == order_of(batches(seed=1))
    assert first != second
    assert first != order_of(batches(seed=2))
    # The companions of a row change, not just the order of the batches.
    assert set(first) != set(second)


def test_bucket_has_one_shape():
    cut = batches()
    shapes = {cut(step).tokens.shape for step in range(cut.per_epoch)}
    assert len(shapes) == len({length for _, length in shapes})
    assert {length - 1 for _, length in shapes} <= set(bucket_lengths(LONGEST))


@pytest.mark.parametrize("longest", [8, 15, 16, 17, 64, 100, 511, 512, 4096])
def test_bucket_lengths_grow_by_half_at_most(longest):
    rungs = bucket_lengths(longest)
    assert rungs[-1] == longest
    assert rungs == sorted(set(rungs))
    assert rungs[0] <= 16
    assert all(high <= 1.5 * low for low, high in pairwise(rungs))


@pytest.mark.parametrize(
    "sizes", [{"batch_size": 8}, {"batch_size": None, "batch_tokens": 512}]
)
def test_at_most_a_third_of_a_sequence_is_padding(sizes):
    for batch in batches(**sizes).in_order():
        for tokens, _ in rows(batch):
            inputs = np.count_nonzero(tokens) - 1
            assert inputs > 2 / 3 * batch.mask.shape[1] - 1 or inputs <= 16


@pytest.mark.parametrize("count", [1, 2, 8, 9, 17, 33])
@pytest.mark.parametrize("most", [1, 8, 10_000])
def test_small_dataset_is_not_padded_to_a_full_batch(count, most):
    made = [
        Example(np.full(10, i + 1, np.int32), np.arange(10) > 4, f"f:{i + 1}")
        for i in range(count)
    ]
    cut = batches(examples=made, batch_size=most)
    assert cut.per_epoch == -(-count // most)
    sizes = {len(batch.mask) for batch in cut.in_order()}
    assert len(sizes) == 1
    [size] = sizes
    assert size <= most
    # Less than one row of padding for every batch.
    assert size * cut.per_epoch - count < cut.per_epoch


def test_tokens_limit_the_batch():
    cut = batches(batch_size=None, batch_tokens=256)
    full = {batch.mask.shape for batch in cut.in_order()}
    assert all(size * length <= 256 for size, length in full)
    # Short rows go in larger batches.
    assert [size for size, _ in sorted(full, key=lambda s: s[1])] == sorted(
        (size for size, _ in full), reverse=True
    )
    assert max(size * length for size, length in full) > 192


def test_sequence_above_the_token_limit_is_alone():
    cut = batches(batch_size=None, batch_tokens=20)
    assert {b.mask.shape[0] for b in cut.in_order() if b.mask.shape[1] > 20} == {1}


def test_in_order_covers_every_example_once():
    cut = batches()
    found = [row for batch in cut.in_order() for row in batch.where]
    assert sorted(found) == sorted(e.where for e in cut.examples)
    again = [row for batch in cut.in_order() for row in batch.where]
    assert found == again


def test_first_batches_in_order_have_every_length():
    cut = batches()
    few = list(cut.in_order(len(cut.buckets)))
    assert len(few) == len(cut.buckets)
    assert len({batch.mask.shape[1] for batch in few}) == len(cut.buckets)


def test_lengths_at_bucket_edges_fit():
    made = [
        Example(np.arange(1, n + 1, dtype=np.int32), np.arange(n) == n - 1, f"f:{n}")
        for n in range(2, 66)
    ]
    cut = BucketBatchSampler(made, max_seq_length=65, batch_size=4)
    for batch in cut.in_order():
        for tokens, mask in rows(batch):
            length = np.count_nonzero(tokens)
            assert np.flatnonzero(mask).tolist() == [length - 2]
