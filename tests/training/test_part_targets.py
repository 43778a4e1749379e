"""Targets on disk: compressed distributions of one teacher and its tokens."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.errors import UserError
from lmx.files.artifacts import ArtifactStore
from lmx.interfaces import Logger
from lmx.models.loader import build_model
from lmx.training import teacher_cache
from lmx.training.teacher_cache import cache_part_targets
from lmx.training.teacher_targets import bytes_per_token, compress_targets, index_dtype
from tiny_checkpoints import LLAMA

VOCABULARY = 40
PARTS = [mx.random.randint(0, VOCABULARY, (3, 5), key=mx.random.key(i)) for i in (0, 1)]
TABLE = 3 * mx.random.normal((VOCABULARY, VOCABULARY), key=mx.random.key(2))


class Teacher:
    """Predicts from the last token only, and counts its calls."""

    def __init__(self, stop_at=None):
        self.calls = 0
        self.stop_at = stop_at

    def __call__(self, tokens):
        if self.calls == self.stop_at:
            raise KeyboardInterrupt
        self.calls += 1
        return TABLE[tokens]


def part_targets(folder, teacher, *, parts=PARTS, top_k=8, digest="a", logger=None):
    logger = logger or Logger()
    return cache_part_targets(
        ArtifactStore(folder, logger.warning),
        "parts",
        parts,
        teacher,
        digest=digest,
        top_k=top_k,
        logger=logger,
    )


def softmax(logits):
    x = np.array(logits).astype(np.float64)
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("top_k", [1, 8, VOCABULARY, 1000])
def test_part_targets_are_the_teachers_top_k_and_tail(tmp_path, top_k):
    result = part_targets(tmp_path, Teacher(), top_k=top_k)
    assert len(result) == 2
    for tokens, target in zip(PARTS, result, strict=True):
        expected = softmax(TABLE[tokens])
        count = min(top_k, VOCABULARY)
        indices = np.array(target.indices)
        assert indices.shape == (3, 5, count)
        order = np.argsort(-expected, axis=-1)[..., :count]
        assert np.array_equal(np.sort(indices), np.sort(order))
        chosen = np.take_along_axis(expected, indices, axis=-1)
        assert np.allclose(np.exp(target.log_probs), chosen, rtol=5e-3)
        tail = 1 - chosen.sum(axis=-1)
        assert np.allclose(np.exp(target.log_tail), tail, rtol=5e-3, atol=1e-9)
        total = np.exp(target.log_probs).sum(axis=-1) + np.exp(target.log_tail)
        assert np.allclose(total, 1, atol=1e-6)


def test_model_predicts_a_few_positions_at_a_time(tmp_path, monkeypatch):
    model = build_model(LLAMA)
    expected = compress_targets(model(PARTS[0]), 8)
    monkeypatch.setattr(teacher_cache, "logit_positions", lambda: 4)
    shapes = []
    monkeypatch.setattr(
        teacher_cache,
        "compress_targets",
        lambda logits, *rest: (
            shapes.append(logits.shape) or compress_targets(logits, *rest)
        ),
    )
    result = part_targets(tmp_path, model, parts=PARTS[:1])[0]
    vocab_size = LLAMA["vocab_size"]
    assert shapes == [(n, vocab_size) for n in (4, 4, 4, 3)]
    assert result.indices.shape == (3, 5, 8)
    assert mx.array_equal(mx.sort(result.indices), mx.sort(expected.indices))
    assert mx.allclose(result.log_tail, expected.log_tail, atol=1e-3)


def test_compressed_tail_is_exact():
    logits = mx.concatenate([mx.array([40.0, 39.0]), mx.arange(6) / 7])[None, None]
    tail = compress_targets(logits, 2).log_tail.item()
    assert tail == pytest.approx(np.log(softmax(logits)[..., 2:].sum()), abs=1e-5)
    assert compress_targets(logits, 8).log_tail.item() == -np.inf


def test_part_targets_check_free_space_first(tmp_path, monkeypatch):
    logger, lines = Logger(), []
    monkeypatch.setattr(logger, "info", lines.append)
    result = part_targets(tmp_path, Teacher(), logger=logger)
    expected = 30 * bytes_per_token(8, VOCABULARY)
    assert bytes_per_token(8, VOCABULARY) == 8 * 4 + 4
    assert bytes_per_token(256, 150_000) == 256 * 6 + 4
    files = [*tmp_path.rglob("*.npy")]
    # Every file also has a header.
    assert 0 <= sum(f.stat().st_size for f in files) - expected < 512 * len(result)
    assert "30 tokens" in lines[0]
    monkeypatch.setattr("lmx.files.atomic.free_bytes", lambda _: expected - 1)
    with pytest.raises(UserError, match=r"this needs .* MB"):
        part_targets(tmp_path / "full", Teacher())
    assert not [*(tmp_path / "full").rglob("*.npy")]


def test_index_dtype():
    assert index_dtype(1 << 16) == np.uint16
    assert index_dtype((1 << 16) + 1) == np.uint32


@pytest.mark.parametrize(
    "change",
    [{"digest": "b"}, {"top_k": 9}, {"parts": PARTS[::-1]}],
    ids=lambda change: next(iter(change)),
)
def test_other_settings_have_other_targets(tmp_path, change):
    part_targets(tmp_path, Teacher())
    teacher = Teacher()
    part_targets(tmp_path, teacher, **change)
    assert teacher.calls == 2
