"""Packed sequences hold every example once, as tightly as best-fit decreasing."""

from bisect import insort
from dataclasses import replace

import numpy as np
import pytest
from lmx.data.batching import BucketBatchSampler, InMemoryExamples
from lmx.data.packing import PackedBatchSampler, pack, packed
from lmx.models.loader import build_model
from lmx.training.document_mask import DocumentCaches
from lmx.training.step import TrainStep
from test_data_batching import examples
from tiny_checkpoints import LLAMA

LONGEST = 100


def best_fit_bins(lengths, capacity):
    """Return the number of bins of best-fit decreasing, one example at a time."""
    spaces = []
    for length in sorted(lengths, reverse=True):
        fitting = [space for space in spaces if space >= length]
        space = min(fitting, default=capacity)
        if fitting:
            spaces.remove(space)
        insort(spaces, space - length)
    return len(spaces)


@pytest.mark.parametrize("capacity", [1, 8, 65, 513])
@pytest.mark.parametrize("count", [1, 2, 50, 700])
def test_packing_equals_best_fit_decreasing(count, capacity):
    for seed in range(4):
        generator = np.random.default_rng([count, capacity, seed])
        share = generator.choice([0.2, 1.0])
        longest = max(1, int(capacity * share))
        lengths = generator.integers(1, longest + 1, count)
        order, starts = pack(lengths, capacity)
        assert sorted(order) == list(range(count))
        assert (starts[0], starts[-1]) == (0, count)
        totals = np.add.reduceat(lengths[order], starts[:-1])
        assert totals.max() <= capacity
        assert (np.diff(starts) > 0).all()
        assert len(totals) == best_fit_bins(lengths, capacity)
        repeated = pack(lengths, capacity)
        assert np.array_equal(order, repeated[0])
        assert np.array_equal(starts, repeated[1])


def test_packed_chats_are_almost_full():
    lengths = np.random.default_rng(0).lognormal(4, 0.8, 20_000).astype(int)
    lengths = lengths.clip(2, 512)
    _, starts = pack(lengths, 513)
    assert lengths.sum() / (513 * (len(starts) - 1)) > 0.99


def batches(dataset=None, **settings):
    dataset = InMemoryExamples(dataset or examples(longest=40))
    settings = {"max_seq_length": LONGEST, "batch_size": 8} | settings
    return dataset, PackedBatchSampler(
        dataset, pack(dataset.lengths, LONGEST + 1), **settings
    )


def test_epoch_packs_every_example_once():
    dataset, sampler = batches()
    assert sampler.per_epoch < 300 / 8
    for epoch in range(2):
        places = []
        for step in range(sampler.per_epoch):
            batch = sampler(epoch * sampler.per_epoch + step)
            assert batch.tokens.shape[1] == LONGEST + 1
            assert batch.mask.shape == batch.documents.shape
            places += batch.where
        assert sorted(places) == sorted(example.where for example in dataset)


def test_packed_documents_are_whole_and_masked():
    dataset, sampler = batches()
    by_place = {example.where: example for example in dataset}
    for step in range(sampler.per_epoch):
        batch = sampler(step)
        places = iter(batch.where)
        tokens, mask = np.array(batch.tokens), np.array(batch.mask)
        for row, documents in enumerate(np.array(batch.documents)):
            end = number = 0
            # Examples contain no token 0.
            while end <= LONGEST and tokens[row, end]:
                example = by_place[next(places)]
                start, end = end, end + len(example.tokens)
                assert tokens[row, start:end].tolist() == example.tokens.tolist()
                trained = np.concatenate([[False], mask[row]])[start:end]
                assert trained.tolist() == example.mask.tolist()
                assert (documents[start:end] == number).all()
                number += 1
            assert not tokens[row, end:].any()
            assert not mask[row, max(0, end - 1) :].any()
            assert (documents[end:] == number).all()
        assert next(places, None) is None


def test_filler_sequence_is_one_untrained_document():
    _, sampler = batches(batch_size=7)
    sequences = [
        sequence
        for step in range(sampler.per_epoch)
        for sequence in _sequences(sampler(step))
    ]
    filler = [sequence for sequence in sequences if not sequence[0].any()]
    assert len(sequences) - len(filler) == sampler.num_sequences
    for _, mask, documents in filler:
        assert not mask.any()
        assert not documents.any()


def _sequences(batch):
    return zip(*map(np.array, batch.arrays()[:3]), strict=True)


def test_packed_batch_depends_on_seed_and_step_only():
    (_, sequential), (_, random_access) = batches(seed=3), batches(seed=3)
    expected = {step: random_access(step) for step in (30, 2, 0, 31)}
    for step, batch in expected.items():
        assert np.array_equal(sequential(step).tokens, batch.tokens)
    epoch, other_seed = (
        [sampler(step).where for step in range(sampler.per_epoch)]
        for sampler in (sequential, batches(seed=4)[1])
    )
    assert epoch != other_seed


def test_packing_plan_is_cached(cache_folder, monkeypatch):
    dataset = InMemoryExamples(examples())
    plan = packed(dataset, LONGEST + 1, print)
    monkeypatch.setattr("lmx.data.packing.pack", None)
    repeated = packed(dataset, LONGEST + 1, print)
    assert all(np.array_equal(a, b) for a, b in zip(plan, repeated, strict=True))
    with pytest.raises(TypeError):
        packed(dataset, LONGEST + 2, print)
    with pytest.raises(TypeError):
        packed(InMemoryExamples(examples(seed=1)), LONGEST + 1, print)


def test_packed_sequences_have_the_loss_of_their_examples():
    """With document masks the losses are equal. Without masks they differ."""
    model = build_model(LLAMA)
    dataset = InMemoryExamples(
        replace(example, tokens=example.tokens % 319 + 1)
        for example in examples(60, longest=40)
    )
    _, sampler = batches(dataset, batch_size=4)
    step = TrainStep(model, document_caches=DocumentCaches(model))
    packed_batches = [sampler(number) for number in range(sampler.per_epoch)]
    unpacked_batches = BucketBatchSampler(
        dataset, max_seq_length=LONGEST, batch_size=8
    ).in_order()
    loss, tokens, _ = step.evaluate(unpacked_batches)
    packed_loss, packed_tokens, _ = step.evaluate(packed_batches)
    assert packed_tokens == tokens
    assert packed_loss == pytest.approx(loss, rel=1e-5)
    unmasked_loss, *_ = step.evaluate(
        [replace(b, documents=None) for b in packed_batches]
    )
    assert unmasked_loss != pytest.approx(loss, rel=1e-5)
