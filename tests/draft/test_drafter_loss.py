"""The loss of drafters against sums over positions in NumPy, and its gradients."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from lmx.config.draft import DraftConfig
from lmx.data.batching import BatchArrays
from lmx.draft import losses
from lmx.draft.losses import DrafterLoss, DraftVocabulary, draft_positions
from lmx.models.drafters.base import Drafter, TrainingRounds
from lmx.training.distillation import DIVERGENCES
from lmx.training.losses import LossModel
from lmx.training.teacher_targets import compress_targets, full_targets

VOCABULARY, WIDTH, LENGTH, COUNT = 13, 6, 7, 3
# Tokens that the reduced vocabulary has, in the order of their draft ids.
KNOWN = [1, 2, 4, 5, 8, 11]


class LookupDrafter(Drafter):
    """Its output depends on the start, the position in the draft, and the states."""

    architecture = "lookup"

    def __init__(self, known=None):
        super().__init__()
        self.size = len(known) if known else VOCABULARY
        self.table = mx.random.normal((LENGTH + 1, COUNT, WIDTH), key=mx.random.key(1))
        self.lm_head = nn.Linear(WIDTH, self.size, bias=False)
        self._known = known

    def sample_starts(self, mask):
        return mx.broadcast_to(mx.arange(1, LENGTH + 1), (len(mask), LENGTH))

    def draft_hidden(self, tokens, states, starts, num_draft_tokens):
        return self.table[starts] + states.mean(axis=(1, 2))[:, None, None, None]

    def head(self, hidden):
        return self.lm_head(hidden)

    @property
    def draft_vocab_size(self):
        return self.size

    @property
    def draft_ids(self):
        if self._known is None:
            return None
        ids = np.full(VOCABULARY, self.size)
        ids[self._known] = np.arange(self.size)
        return mx.array(ids, mx.int32)

    def target_tokens(self, draft_ids):
        return draft_ids if self._known is None else mx.array(self._known)[draft_ids]


class SamplingDrafter(LookupDrafter):
    """It computes the draft tokens after the first one for some rounds only."""

    def training_rounds(self, tokens, states, mask, num_draft_tokens):
        [every] = super().training_rounds(tokens, states, mask, num_draft_tokens)
        order = [np.random.permutation(np.arange(1, LENGTH)) for _ in mask]
        starts = mx.array(np.array(order)[:, : self.count])
        hidden = self.draft_hidden(tokens, states, starts, num_draft_tokens)
        first = TrainingRounds(every.starts, 0, every.hidden[:, :, :1])
        weight = (LENGTH - 1) / self.count
        return [first, TrainingRounds(starts, 1, hidden[:, :, 1:], weight)]


def batch(top_k=None, batch_size=2):
    key = mx.random.split(mx.random.key(5), 3)
    tokens = mx.random.randint(0, VOCABULARY, (batch_size, LENGTH + 1), key=key[0])
    teacher = 2 * mx.random.normal((batch_size, LENGTH, VOCABULARY), key=key[1])
    states = mx.random.normal((batch_size, LENGTH, 4), key=key[2])
    mask = mx.arange(LENGTH) >= mx.array([[2], [4]])
    parts = compress_targets(teacher, top_k) if top_k else full_targets(teacher)
    target = (*(part for part in parts if part is not None), states)
    return tokens, mask, target, np.array(nn.softmax(teacher), np.float64)


def reference(drafter, tokens, mask, states, teacher, known, decay, ce_weight):
    """Loss, weights, overlaps and counts, one draft token after the other."""
    loss = weights = 0.0
    overlaps, counts = np.zeros(COUNT), np.zeros(COUNT)
    table = np.array(drafter.table, np.float64)
    head = np.array(drafter.lm_head.weight, np.float64)
    means = np.array(states).mean(axis=(1, 2))
    for row in range(len(tokens)):
        for start in range(1, LENGTH + 1):
            for j in range(COUNT):
                place = start + j
                if place >= LENGTH or not mask[row, start : place + 1].all():
                    break
                logits = head @ (table[start, j] + means[row])
                q = np.exp(logits - logits.max())
                q /= q.sum()
                p = teacher[row, place][known]
                overlaps[j] += np.minimum(p, q).sum()
                counts[j] += 1
                weights += decay**j
                p = p / p.sum()
                overlap = np.minimum(p, q).sum()
                share = np.exp(-3 * overlap)
                divergence = share * (p * np.log(p / q)).sum()
                divergence += (1 - share) * (1 - overlap)
                token = int(tokens[row, place + 1])
                ce = -np.log(q[known.index(token)]) if token in known else 0.0
                loss += decay**j * ((1 - ce_weight) * divergence + ce_weight * ce)
    return loss, weights, overlaps, counts


def loss_of(loss, drafter, tokens, mask, places, target):
    arrays = BatchArrays(tokens, mask, None, places, target)
    return loss(LossModel(drafter), arrays)


@pytest.mark.parametrize("known", [None, KNOWN])
@pytest.mark.parametrize("chunk", [3, 6, 1000])
def test_loss_is_weighted_sum_over_valid_draft_tokens(known, chunk):
    drafter = LookupDrafter(known)
    config = DraftConfig(
        architecture="eagle3",
        ce_weight=0.3,
        drafter={"num_draft_tokens": COUNT},
    )
    tokens, mask, target, teacher = batch()
    loss, count, metrics = loss_of(
        DrafterLoss(config, chunk=chunk), drafter, tokens, mask, None, target
    )
    arguments = np.array(tokens), np.array(mask), target[-1], teacher
    known = known or list(range(VOCABULARY))
    expected = reference(drafter, *arguments, known, 0.8, 0.3)
    assert loss.item() == pytest.approx(expected[0], rel=1e-5)
    assert count.item() == pytest.approx(expected[1])
    assert np.allclose(metrics, expected[2:], rtol=1e-5)
    # Controls: another weight, and targets one position off.
    assert loss.item() != pytest.approx(
        reference(drafter, *arguments, known, 1.0, 0.3)[0], rel=1e-2
    )
    shifted = (*arguments[:3], np.roll(teacher, 1, axis=1))
    assert loss.item() != pytest.approx(
        reference(drafter, *shifted, known, 0.8, 0.3)[0], rel=1e-3
    )


@pytest.mark.parametrize(
    ("count", "draws", "error"), [(LENGTH - 1, 1, 1e-5), (3, 400, 0.02)]
)
def test_sampled_rounds_estimate_the_loss_of_all(count, draws, error):
    """Exactly, if all are sampled."""
    config = DraftConfig(architecture="eagle3", drafter={"num_draft_tokens": COUNT})
    tokens, mask, target, _ = batch()
    loss = DrafterLoss(config, chunk=1000)
    whole, drafter = LookupDrafter(), SamplingDrafter()
    drafter.lm_head, drafter.count = whole.lm_head, count
    expected, total, _ = loss_of(loss, whole, tokens, mask, None, target)
    np.random.seed(0)
    results = [loss_of(loss, drafter, tokens, mask, None, target) for _ in range(draws)]
    for index, whole_sum in enumerate((expected, total)):
        mean = np.mean([result[index].item() for result in results])
        assert mean == pytest.approx(whole_sum.item(), rel=error)


@pytest.mark.parametrize("known", [None, KNOWN])
def test_top_k_target_of_all_tokens_is_the_full_target(known):
    drafter = LookupDrafter(known)
    config = DraftConfig(
        architecture="eagle3", drafter={"num_draft_tokens": COUNT}, ce_weight=0
    )
    loss = DrafterLoss(config, chunk=1000)
    tokens, mask, full, _ = batch()
    *_, top_k, _ = batch(top_k=VOCABULARY)
    results = [
        loss_of(loss, drafter, tokens, mask, None, target) for target in (full, top_k)
    ]
    for first, second in zip(*results, strict=True):
        assert np.allclose(first, second, rtol=1e-5)


def test_gradients_do_not_depend_on_chunks_and_places(monkeypatch):
    drafter = LookupDrafter(KNOWN)
    # The weight of adaptive_kl_tv has no gradient.
    monkeypatch.setattr(losses, "adaptive_kl_tv", DIVERGENCES["forward_kl"])
    config = DraftConfig(architecture="eagle3", drafter={"num_draft_tokens": COUNT})
    tokens, mask, target, _ = batch(top_k=8)

    def gradients(chunk, places):
        loss = DrafterLoss(config, chunk=chunk)

        def value(model):
            return loss_of(loss, model, tokens, mask, places, target)[0]

        return nn.value_and_grad(drafter, value)(drafter)

    value, whole = gradients(1000, None)
    # As many places as rounds with a trained token.
    places = mx.arange(int(mask[:, 1:].sum()) + 1)
    for chunk in (3, 1000):
        other_value, other = gradients(chunk, places)
        assert other_value.item() == pytest.approx(value.item(), rel=1e-5)
        assert mx.allclose(other["table"], whole["table"], atol=1e-5)
        assert mx.allclose(
            other["lm_head"]["weight"], whole["lm_head"]["weight"], atol=1e-5
        )
    # Finite differences of one weight.
    step = 1e-2
    weight = drafter.lm_head.weight
    values = []
    for sign in (1, -1):
        drafter.lm_head.weight = weight.at[2, 3].add(sign * step)
        values.append(gradients(1000, None)[0].item())
    slope = (values[0] - values[1]) / (2 * step)
    assert slope == pytest.approx(whole["lm_head"]["weight"][2, 3].item(), rel=1e-2)


def test_draft_tokens_after_an_untrained_one_are_not_valid():
    mask = mx.array([[True, True, False, True, True]])
    positions, valid = draft_positions(mask, mx.array([[1, 3, 5]]), 3)
    assert positions.tolist() == [[1, 2, 3], [3, 4, 4], [4, 4, 4]]
    assert valid.tolist() == [
        [True, False, False],
        [True, True, False],
        [False, False, False],
    ]


def test_probability_of_unknown_tokens_is_not_covered():
    drafter = LookupDrafter(KNOWN)
    vocabulary = DraftVocabulary(drafter)
    teacher = mx.random.normal((4, VOCABULARY), key=mx.random.key(2))
    for target in (full_targets(teacher), compress_targets(teacher, 7)):
        translated = vocabulary.translate(target)
        restricted = vocabulary.restrict(translated)
        total = mx.exp(restricted.log_probs).sum(axis=-1)
        if restricted.log_tail is not None:
            total = total + mx.exp(restricted.log_tail)
        assert mx.allclose(total, mx.ones(4), atol=1e-5)
    # The padded column has no probability, so unknown tokens are never drafted.
    padded = mx.softmax(vocabulary.pad(mx.zeros((1, len(KNOWN)))), axis=-1)
    assert padded[0, -1].item() == 0
