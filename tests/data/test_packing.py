"""Packed rows: every example once, none too full, as few as best fit decreasing has."""

from bisect import insort
from dataclasses import replace

import numpy as np
import pytest
from lmx.config.model import ScratchModelConfig
from lmx.data.batching import BucketBatchSampler, InMemoryExamples
from lmx.data.packing import PackedBatchSampler, pack, packed
from lmx.models import from_scratch
from lmx.models.loader import build_model
from lmx.training.document_mask import DocumentCaches
from lmx.training.step import TrainStep
from test_data_batching import examples

LONGEST = 100


def bins_of_best_fit(lengths, capacity):
    """How many rows best fit decreasing takes, one example at a time."""
    spaces = []
    for length in sorted(lengths, reverse=True):
        fitting = [space for space in spaces if space >= length]
        space = min(fitting, default=capacity)
        if fitting:
            spaces.remove(space)
        insort(spaces, space - length)
    return len(spaces)


def bins_of_first_fit(lengths, capacity):
    spaces = []
    for length in lengths:
        for index, space in enumerate(spaces):
            if space >= length:
                spaces[index] -= length
                break
        else:
            spaces.append(capacity - length)
    return len(spaces)


@pytest.mark.parametrize("capacity", [1, 8, 65, 513])
@pytest.mark.parametrize("count", [1, 2, 50, 700])
def test_packing_equals_best_fit_decreasing(count, capacity):
    for seed in range(4):
        generator = np.random.default_rng([count, capacity, seed])
        share = generator.choice([0.2, 1.0])
        most = max(1, int(capacity * share))
        lengths = generator.integers(1, most + 1, count)
        order, starts = pack(lengths, capacity)
        assert sorted(order) == list(range(count))
        assert (starts[0], starts[-1]) == (0, count)
        full = np.add.reduceat(lengths[order], starts[:-1])
        assert full.max() <= capacity
        assert (np.diff(starts) > 0).all()
        assert len(full) == bins_of_best_fit(lengths, capacity)
        assert len(full) <= bins_of_first_fit(lengths, capacity)
        again = pack(lengths, capacity)
        assert np.array_equal(order, again[0])
        assert np.array_equal(starts, again[1])


def test_packed_chats_are_almost_full():
    lengths = np.random.default_rng(0).lognormal(4, 0.8, 20_000).astype(int)
    lengths = lengths.clip(2, 512)
    _, starts = pack(lengths, 513)
    assert lengths.sum() / (513 * (len(starts) - 1)) > 0.99


def batches(made=None, **settings):
    made = InMemoryExamples(made or examples(longest=40))
    settings = {"max_seq_length": LONGEST, "batch_size": 8} | settings
    return made, PackedBatchSampler(made, pack(made.lengths, LONGEST + 1), **settings)


def test_epoch_packs_every_example_once():
    made, cut = batches()
    assert cut.per_epoch < 300 / 8
    for epoch in range(2):
        found = []
        for step in range(cut.per_epoch):
            batch = cut(epoch * cut.per_epoch + step)
            assert batch.tokens.shape[1] == LONGEST + 1
            assert batch.mask.shape == batch.documents.shape
            found += batch.where
        assert sorted(found) == sorted(example.where for example in made)


def test_packed_documents_are_whole_and_masked():
    made, cut = batches()
    by_place = {example.where: example for example in made}
    for step in range(cut.per_epoch):
        batch = cut(step)
        places = iter(batch.where)
        tokens, mask = np.array(batch.tokens), np.array(batch.mask)
        for row, documents in enumerate(np.array(batch.documents)):
            end = number = 0
            # No example holds a zero.
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
    _, cut = batches(batch_size=7)
    rows = [row for step in range(cut.per_epoch) for row in _rows(cut(step))]
    empty = [row for row in rows if not row[0].any()]
    assert len(rows) - len(empty) == cut.num_sequences
    for _, mask, documents in empty:
        assert not mask.any()
        assert not documents.any()


def _rows(batch):
    return zip(*map(np.array, batch.arrays), strict=True)


def test_packed_batch_depends_on_seed_and_step_only():
    (_, straight), (_, jumping) = batches(seed=3), batches(seed=3)
    found = {step: jumping(step) for step in (30, 2, 0, 31)}
    for step, batch in found.items():
        assert np.array_equal(straight(step).tokens, batch.tokens)
    epoch, other = (
        [cut(step).where for step in range(cut.per_epoch)]
        for cut in (straight, batches(seed=4)[1])
    )
    assert epoch != other


def test_packing_plan_is_cached(cache_folder, monkeypatch):
    made = InMemoryExamples(examples())
    plan = packed(made, LONGEST + 1, print)
    monkeypatch.setattr("lmx.data.packing.pack", None)
    again = packed(made, LONGEST + 1, print)
    assert all(np.array_equal(a, b) for a, b in zip(plan, again, strict=True))
    with pytest.raises(TypeError):
        packed(made, LONGEST + 2, print)
    with pytest.raises(TypeError):
        packed(InMemoryExamples(examples(seed=1)), LONGEST + 1, print)


def test_packed_rows_have_the_loss_of_their_examples():
    """Through a model that sees no other document; one that does has another loss."""
    settings = ScratchModelConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        dtype="float32",
    )
    config = from_scratch.llama_config(settings)
    model = build_model(config)
    model.load_weights(list(from_scratch.initial_weights(config, 0).items()))
    made = InMemoryExamples(
        replace(example, tokens=example.tokens % 319 + 1)
        for example in examples(60, longest=40)
    )
    _, cut = batches(made, batch_size=4)
    step = TrainStep(model, document_caches=DocumentCaches(model))
    sequences_per_batch = [cut(number) for number in range(cut.per_epoch)]
    alone = BucketBatchSampler(made, max_seq_length=LONGEST, batch_size=8).in_order()
    loss, tokens = step.evaluate(alone)
    together, as_many = step.evaluate(sequences_per_batch)
    assert as_many == tokens
    assert together == pytest.approx(loss, rel=1e-5)
    mixed, _ = step.evaluate([replace(b, documents=None) for b in sequences_per_batch])
    assert mixed != pytest.approx(loss, rel=1e-5)
