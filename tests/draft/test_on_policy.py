"""Replays: cut where guesses fall, written on by the draft, told by the target."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.draft import OnPolicyConfig
from lmx.data.batching import Batch
from lmx.draft.losses import DraftLoss
from lmx.draft.on_policy import OnPolicyBatches, find_rejections
from lmx.training.teacher_targets import compress_targets, full_targets
from test_draft_benchmark import VOCABULARY, law_of, lessons, student

WRONG = 5


def wrong_behind(token):
    """A draft that knows the law but behind one token."""

    def draft(tokens):
        known = law_of()[tokens]
        return mx.where((tokens == token)[..., None], mx.zeros(VOCABULARY), known)

    return draft


def judged(lesson, row):
    """The places of a row where a guess may fall."""
    return np.flatnonzero(np.array(lesson.mask)[row])[1:]


def test_find_rejections_cuts_at_draft_errors():
    draws, cut, expected = np.random.default_rng(0), 0, 0
    for lesson in lessons(None):
        read = np.array(lesson.tokens)[:, :-1]
        for row in range(len(lesson.where)):
            expected += (read[row, judged(lesson, row)] == WRONG).any()
        for replay in find_rejections(wrong_behind(WRONG), lesson, draws):
            cut += replay.tokens[-1] == WRONG
            row = lesson.where.index(replay.where)
            assert replay.tokens == read[row, : len(replay.tokens)].tolist()
            assert len(replay.tokens) - 1 in judged(lesson, row)
            assert replay.prompt_length == 4
    assert cut == expected > 10


def test_find_rejections_samples_by_rejection_probability():
    random = np.random.default_rng(3)
    tokens = mx.array(random.integers(0, VOCABULARY, (1, 7)), mx.int32)
    mask = mx.array([[False, False, True, True, True, True]])
    p, q = random.normal(size=(2, 6, VOCABULARY))
    q[4] = p[4] + 0.3 * q[4]
    target = (*full_targets(mx.array(p)[None]), mx.ones(mask.shape, mx.bool_))
    lesson = Batch(tokens, mask, ("here",), target=target)
    draws, count = np.random.default_rng(0), 1500
    cut = [
        len(replay.tokens) - 1
        for _ in range(count)
        for replay in find_rejections(lambda tokens: mx.array(q)[None], lesson, draws)
    ]
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (p, q))
    falls = 1 - np.minimum(p, q).sum(-1)[3:]
    shares = falls / falls.sum()
    found = np.bincount(cut, minlength=6) / count
    errors = 4 * np.sqrt(shares * (1 - shares) / count)
    assert (np.abs(found[3:] - shares) < errors).all()
    assert not found[:3].any()
    # All alike would be told from it.
    assert (np.abs(shares - 1 / 3) > errors).any()


@pytest.fixture
def replays(tmp_path):
    """Of a draft so sure of itself that it draws its likeliest token."""
    draft = student()
    draft.model.norm.weight *= 1000
    made = []

    def now():
        made.append(len(made))
        return draft

    def begun():
        return OnPolicyBatches(
            lessons(8),
            OnPolicyConfig(rollout_tokens=3, rollout_interval=2),
            begin=4,
            folder=tmp_path / "replays",
            draft=now,
            stop_tokens=frozenset(),
            info=lambda text: None,
        )

    return begun, draft, made


def rows(batch):
    """Tokens of every row, and which of them the target said."""
    *_, own = batch.target
    found = []
    for row in range(len(batch.where)):
        trained = np.flatnonzero(np.array(batch.mask)[row])
        tokens = np.array(batch.tokens)[row, : trained[-1] + 2].tolist()
        found.append((tokens, np.array(own)[row, : len(tokens) - 1]))
    return found


def test_on_policy_batches_hold_draft_tokens_and_target_predictions(replays):
    begun, draft, made = replays
    taught = begun()
    plain = lessons(8)
    for step in range(4):
        assert mx.array_equal(taught(step).tokens, plain(step).tokens)
    assert not made
    wrote = 0
    for step in (4, 5, 6):
        batch = taught(step)
        for tokens, own in rows(batch):
            guessed = int((~own).sum())
            assert guessed == 3
            assert not own[-guessed:].any()
            for count in range(guessed, 0, -1):
                logits = draft(mx.array([tokens[:-count]]))[0, -1]
                assert mx.argmax(logits).item() == tokens[-count]
                wrote += 1
        expected = compress_targets(law_of()[batch.tokens[:, :-1]], 8)
        named, found = (
            np.sort(np.array(x.astype(mx.float32)), axis=-1)
            for x in (expected.log_probs, batch.target[1])
        )
        assert np.allclose(named, found, atol=1e-5)
    assert wrote > 20
    # By the draft of step 4, and by that of step 6.
    assert made == [0, 1]


def test_resumed_run_reuses_replays(replays):
    begun, draft, made = replays
    first = [begun()(step).tokens.tolist() for step in (5, 7)]
    asked = len(made)
    draft.model.norm.weight *= -1
    assert [begun()(step).tokens.tolist() for step in (5, 7)] == first
    assert len(made) == asked
    assert begun()(9).tokens.tolist() != first[1]


def test_draft_tokens_are_not_labels():
    """The divergence counts at every place, the tokens where the target said them."""
    random = np.random.default_rng(1)
    p, q = (mx.array(random.normal(size=(1, 4, VOCABULARY))) for _ in range(2))
    tokens, mask = mx.array([[3, 1, 4, 1]]), mx.ones((1, 4), mx.bool_)
    own = mx.array([[True, True, False, False]])
    objective = DraftLoss("forward_kl", cross_entropy=0.5)
    found = objective(q, tokens, mask, *compress_targets(p, VOCABULARY), own).item()
    logp, logq = (np.array(x - mx.logsumexp(x, axis=-1, keepdims=True)) for x in (p, q))
    divergence = (np.exp(logp) * (logp - logq)).sum()
    said = -logq[0, [0, 1], [3, 1]].sum()
    assert found == pytest.approx(0.5 * divergence + 0.5 * said, abs=1e-4)
