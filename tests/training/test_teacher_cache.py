"""Cached teacher targets: computed once, keyed by all settings, resumable."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from lmx.data import cache
from lmx.data.batching import BucketBatchSampler, InMemoryExamples
from lmx.data.packing import PackedBatchSampler, pack
from lmx.errors import UserError
from lmx.interfaces import Logger
from lmx.training import teacher_cache
from lmx.training.distillation import OnlineTeacher, divergence_sum
from lmx.training.teacher_cache import TeacherClient, cache_teacher_targets
from lmx.training.teacher_targets import bytes_per_token, full_targets
from tiny_steps import VOCABULARY, Tiny, random_examples

EXAMPLES = InMemoryExamples(random_examples(30, 20))
ALL = np.arange(30)


class Teacher(OnlineTeacher):
    """Counts its input tokens, and stops at call number `stop_at`."""

    def __init__(self, stop_at=None):
        super().__init__(Tiny())
        self.num_tokens, self.calls, self.stop_at = 0, 0, stop_at

    def hidden(self, inputs, documents=None):
        self.calls += 1
        if self.calls == self.stop_at:
            raise KeyboardInterrupt
        self.num_tokens += inputs.size
        return super().hidden(inputs, documents)


@pytest.fixture(autouse=True)
def _cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LMX_CACHE", str(tmp_path))


def source(teacher, digest="a", logger=None):
    logger = logger or Logger()
    return TeacherClient(lambda: teacher, digest, VOCABULARY, logger)


def cached_targets(
    teacher, members=ALL, *, top_k=4, temperature=1.0, examples=EXAMPLES, **more
):
    settings = {"top_k": top_k, "temperature": temperature}
    return cache_teacher_targets(examples, members, source(teacher, **more), **settings)


def batches(packed):
    if not packed:
        return BucketBatchSampler(EXAMPLES, max_seq_length=20, batch_size=4)
    return PackedBatchSampler(
        EXAMPLES, pack(EXAMPLES.lengths, 33), max_seq_length=32, batch_size=3
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_cached_targets_equal_the_online_teacher(packed, temperature):
    """Targets of all tokens equal the online teacher up to float16 rounding."""
    targets = cached_targets(Teacher(), top_k=100, temperature=temperature)
    for number in range(3):
        batch = targets(batches(packed)(number))
        logits = Tiny()(batch.tokens[:, :-1]) / temperature
        indices, log_probs, log_tail = map(np.array, batch.target)
        mask = np.array(batch.mask)
        expected = np.array(full_targets(logits).log_probs)
        chosen = np.take_along_axis(expected, indices, axis=-1)
        np.testing.assert_allclose(log_probs[mask], chosen[mask], rtol=1e-3, atol=1e-3)
        assert np.array_equal(np.sort(indices[mask])[0], np.arange(VOCABULARY))
        assert np.all(log_tail[mask] == -np.inf)
        student = 2 * logits[..., ::-1]
        result, live = (
            divergence_sum(student, target, batch.mask).item() / mask.sum()
            for target in (
                full_targets(logits),
                type(full_targets(logits))(*batch.target),
            )
        )
        assert result == pytest.approx(live, abs=2e-4)


def test_cache_is_reused_and_resumed(monkeypatch):
    monkeypatch.setattr(teacher_cache, "BLOCK_TOKENS", 40)
    with pytest.raises(KeyboardInterrupt):
        cached_targets(Teacher(stop_at=3))
    second, third = Teacher(), Teacher()
    result = cached_targets(second)
    assert second.num_tokens > 0
    cached_targets(third)
    assert third.num_tokens == 0
    monkeypatch.setenv("LMX_CACHE", str(cache.root() / "anew"))
    whole_again = Teacher()
    again = cached_targets(whole_again)
    assert second.num_tokens < whole_again.num_tokens
    for number in range(4):
        pair = (targets(batches(False)(number)).target for targets in (result, again))
        assert all(map(mx.array_equal, *pair))


@pytest.mark.parametrize(
    "change",
    [
        {"digest": "b"},
        {"top_k": 5},
        {"temperature": 2.0},
        {
            "examples": InMemoryExamples(
                [replace(EXAMPLES[0], mask=EXAMPLES[0].tokens >= 0)] * 30
            )
        },
    ],
    ids=lambda change: next(iter(change)),
)
def test_cache_key_covers_all_settings(change):
    cached_targets(Teacher())
    teacher = Teacher()
    cached_targets(teacher, **change)
    assert teacher.num_tokens


def test_cache_computes_selected_examples_and_logs_their_size(monkeypatch):
    members, logger, lines = np.array([3, 4, 17]), Logger(), []
    monkeypatch.setattr(logger, "info", lines.append)
    few = cached_targets(Teacher(), members, logger=logger)
    count = sum(EXAMPLES[n].mask[1:].sum() for n in members)
    assert f"{count} trained tokens, {bytes_per_token(4, VOCABULARY)} bytes" in lines[0]
    every = cached_targets(Teacher())
    for member in members:
        assert all(
            map(np.array_equal, few._of_example(member), every._of_example(member))
        )
    monkeypatch.setattr("lmx.files.atomic.free_bytes", lambda _: 100)
    with pytest.raises(UserError, match=r"this needs .* MB"):
        cached_targets(Teacher(), digest="full")
