"""On-policy batches: rejections, rollouts of the draft and targets."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.draft import OnPolicyConfig
from lmx.data.batching import Batch
from lmx.draft.losses import DraftLoss
from lmx.draft.on_policy import OnPolicyBatches, find_rejections
from lmx.training.teacher_targets import compress_targets, full_targets
from test_draft_benchmark import (
    VOCABULARY,
    distillation_batches,
    draft_model,
    next_token_logits,
)

WRONG = 5


def wrong_after(token):
    """A draft that equals the target except after one token."""

    def draft(tokens):
        expected_logits = next_token_logits()[tokens]
        return mx.where(
            (tokens == token)[..., None], mx.zeros(VOCABULARY), expected_logits
        )

    return draft


def drafted_positions(batch, index):
    """The positions of a sequence where a draft token may be rejected."""
    return np.flatnonzero(np.array(batch.mask)[index])[1:]


def test_find_rejections_cuts_at_draft_errors():
    rng, cuts, expected = np.random.default_rng(0), 0, 0
    for batch in distillation_batches(None):
        read = np.array(batch.tokens)[:, :-1]
        for index in range(len(batch.where)):
            expected += (read[index, drafted_positions(batch, index)] == WRONG).any()
        for replay in find_rejections(wrong_after(WRONG), batch, rng):
            cuts += replay.tokens[-1] == WRONG
            index = batch.where.index(replay.where)
            assert replay.tokens == read[index, : len(replay.tokens)].tolist()
            assert len(replay.tokens) - 1 in drafted_positions(batch, index)
            assert replay.prompt_length == 4
    assert cuts == expected > 10


def test_find_rejections_samples_by_rejection_probability():
    values = np.random.default_rng(3)
    tokens = mx.array(values.integers(0, VOCABULARY, (1, 7)), mx.int32)
    mask = mx.array([[False, False, True, True, True, True]])
    p, q = values.normal(size=(2, 6, VOCABULARY))
    q[4] = p[4] + 0.3 * q[4]
    target = (*full_targets(mx.array(p)[None]), mx.ones(mask.shape, mx.bool_))
    batch = Batch(tokens, mask, ("here",), target=target)
    rng, count = np.random.default_rng(0), 1500
    cuts = [
        len(replay.tokens) - 1
        for _ in range(count)
        for replay in find_rejections(lambda tokens: mx.array(q)[None], batch, rng)
    ]
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (p, q))
    rejection_probs = 1 - np.minimum(p, q).sum(-1)[3:]
    probs = rejection_probs / rejection_probs.sum()
    result = np.bincount(cuts, minlength=6) / count
    errors = 4 * np.sqrt(probs * (1 - probs) / count)
    assert (np.abs(result[3:] - probs) < errors).all()
    assert not result[:3].any()
    # Control: a uniform choice would be detected.
    assert (np.abs(probs - 1 / 3) > errors).any()


@pytest.fixture
def replays(tmp_path):
    """On-policy batches of a draft whose samples are its argmax."""
    draft = draft_model()
    draft.model.norm.weight *= 1000
    rollouts = []

    def current_draft():
        rollouts.append(len(rollouts))
        return draft

    def make_batches():
        return OnPolicyBatches(
            distillation_batches(8),
            OnPolicyConfig(rollout_tokens=3, rollout_interval=2),
            begin=4,
            folder=tmp_path / "replays",
            draft=current_draft,
            stop_tokens=frozenset(),
            info=lambda text: None,
        )

    return make_batches, draft, rollouts


def sequences(batch):
    """Tokens of every sequence, and which of them the target sampled."""
    *_, is_target_token = batch.target
    result = []
    for index in range(len(batch.where)):
        trained = np.flatnonzero(np.array(batch.mask)[index])
        tokens = np.array(batch.tokens)[index, : trained[-1] + 2].tolist()
        result.append((tokens, np.array(is_target_token)[index, : len(tokens) - 1]))
    return result


def test_on_policy_batches_hold_draft_tokens_and_target_predictions(replays):
    make_batches, draft, rollouts = replays
    on_policy = make_batches()
    off_policy = distillation_batches(8)
    for step in range(4):
        assert mx.array_equal(on_policy(step).tokens, off_policy(step).tokens)
    assert not rollouts
    checked = 0
    for step in (4, 5, 6):
        batch = on_policy(step)
        for tokens, is_target_token in sequences(batch):
            num_drafted = int((~is_target_token).sum())
            assert num_drafted == 3
            assert not is_target_token[-num_drafted:].any()
            for count in range(num_drafted, 0, -1):
                logits = draft(mx.array([tokens[:-count]]))[0, -1]
                assert mx.argmax(logits).item() == tokens[-count]
                checked += 1
        expected = compress_targets(next_token_logits()[batch.tokens[:, :-1]], 8)
        expected_log_probs, result = (
            np.sort(np.array(x.astype(mx.float32)), axis=-1)
            for x in (expected.log_probs, batch.target[1])
        )
        assert np.allclose(expected_log_probs, result, atol=1e-5)
    assert checked > 20
    # Rollouts at steps 4 and 6.
    assert rollouts == [0, 1]


def test_resumed_run_reuses_replays(replays):
    make_batches, draft, rollouts = replays
    first = [make_batches()(step).tokens.tolist() for step in (5, 7)]
    num_rollouts = len(rollouts)
    draft.model.norm.weight *= -1
    assert [make_batches()(step).tokens.tolist() for step in (5, 7)] == first
    assert len(rollouts) == num_rollouts
    assert make_batches()(9).tokens.tolist() != first[1]


def test_draft_tokens_are_not_labels():
    """The divergence counts at all positions, cross-entropy only at target tokens."""
    values = np.random.default_rng(1)
    p, q = (mx.array(values.normal(size=(1, 4, VOCABULARY))) for _ in range(2))
    tokens, mask = mx.array([[3, 1, 4, 1]]), mx.ones((1, 4), mx.bool_)
    is_target_token = mx.array([[True, True, False, False]])
    loss = DraftLoss("forward_kl", cross_entropy=0.5)
    result = loss(
        q, tokens, mask, *compress_targets(p, VOCABULARY), is_target_token
    ).item()
    logp, logq = (np.array(x - mx.logsumexp(x, axis=-1, keepdims=True)) for x in (p, q))
    divergence = (np.exp(logp) * (logp - logq)).sum()
    ce = -logq[0, [0, 1], [3, 1]].sum()
    assert result == pytest.approx(0.5 * divergence + 0.5 * ce, abs=1e-4)
