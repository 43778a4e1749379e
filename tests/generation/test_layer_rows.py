"""Caches of a batch: every row has the logits of its sequence, also after rollbacks."""

from itertools import product
from math import inf

import mlx.core as mx
import numpy as np
import pytest
from lmx.errors import UserError
from lmx.generation.kv_cache import batch as batch_module
from lmx.generation.kv_cache.batch import (
    CacheBatch,
    OneRow,
    batch_error,
    require_batchable,
    takes_classes,
    takes_padding,
)
from lmx.generation.kv_cache.layer_rows import WINDOW_SLACK, AttentionRows
from lmx.generation.kv_cache.length_classes import replace_attention
from lmx.generation.kv_cache.sequence import CacheState
from mlx.utils import tree_map
from test_kv_cache import tiny
from tiny_families import FAMILIES, VOCABULARY, WINDOW, member
from tiny_generators import tiny as tiny_generator_model
from tiny_requests import noisy

RING = WINDOW + WINDOW_SLACK
KINDS = ["llama", "gemma3_text", "qwen3_next", "deepseek_v3"]


def texts_of(*lengths, longest=3 * RING):
    draw = np.random.default_rng(0)
    return [draw.integers(1, VOCABULARY, longest).tolist() for _ in lengths]


def started(model, text, length):
    state = CacheState(model)
    if length:
        state.forward(mx.array([text[:length]]))
    return state


class Rows:
    """A batch, and what its rows must compute.

    Args:
        lengths: processed tokens of every row at the start.
    """

    def __init__(self, model, *lengths, has_classes=False):
        self.model, self.texts = model, texts_of(*lengths)
        pairs = list(zip(self.texts, lengths, strict=True))
        self.whole = dict(enumerate(model(mx.array(self.texts))))
        self.order = list(range(len(lengths)))
        first = started(model, *pairs[0])
        free_positions = 0 if has_classes else None
        self.batch = CacheBatch(first, free_positions=free_positions)
        for text, length in pairs[1:]:
            self.batch.join(started(model, text, length))
        assert self.batch.lengths == list(lengths)

    def step(self, counts=None):
        """Process the next tokens of every row; returns the error of the logits.

        Args:
            counts: of every row; the others of the widest row are padding.
        """
        before = list(self.batch.lengths)
        width = max(counts or [1])
        tokens = [
            self.texts[n][start : start + width]
            for n, start in zip(self.order, before, strict=True)
        ]
        logits = self.batch.forward(mx.array(tokens), counts)
        errors = []
        for row, n in enumerate(self.order):
            count = counts[row] if counts else 1
            expected = self.whole[n][before[row] : before[row] + count]
            if count:
                error = mx.abs(logits[row, :count] - expected).max()
                errors.append((error / mx.abs(expected).max()).item())
        return np.max(errors)  # NaN if one is

    def wrong_step(self, width):
        """Process other tokens, and roll back all of them."""
        rows = len(self.order)
        tokens = mx.array(np.full((rows, width), 7))
        self.batch.forward(tokens, [width] * rows)
        self.batch.rollback([width] * rows)


def rows_of(family, *lengths, **options):
    model = tiny(family, max_position_embeddings=4 * RING)
    replace_attention()
    return Rows(noisy(model, 0.1), *lengths, **options)


CLOSE = 2e-5


@pytest.mark.parametrize(
    ("family", "has_classes"), [*product(KINDS, [False]), *product(KINDS[:3], [True])]
)
def test_rows_of_unequal_lengths(family, has_classes):
    """The ring wraps, the buffers grow, and rows with equal lengths meet."""
    rows = rows_of(family, 1, WINDOW - 1, RING - 2, 40, has_classes=has_classes)
    draw = np.random.default_rng(1)
    for _ in range(12):
        counts = draw.integers(0, 9, 4).tolist()
        assert rows.step(counts) < CLOSE
        back = [int(draw.integers(0, count + 1)) for count in counts]
        rows.batch.rollback(back)
        assert rows.step() < CLOSE
    assert max(rows.batch.lengths) > RING


@pytest.mark.parametrize("family", KINDS)
def test_rollback_of_as_many_tokens_as_the_slack(family):
    rows = rows_of(family, 3, RING + 3, 2 * RING - 1)
    rows.wrong_step(WINDOW_SLACK)
    assert rows.step() < CLOSE
    # A prompt that is shorter than what is rolled back, and one after the other.
    for width in (WINDOW_SLACK, 5):
        rows.wrong_step(width)
        assert rows.step() < CLOSE


def test_a_ring_without_slack_loses_positions(monkeypatch):
    """The control of the tests above."""
    init = AttentionRows.__init__

    def short(self, *arguments, **options):
        init(self, *arguments, **options)
        self._size = self.max_size + 4

    monkeypatch.setattr(AttentionRows, "__init__", short)
    rows = rows_of("gemma3_text", 3, RING + 3)
    rows.wrong_step(9)
    assert rows.step() > 1e-3


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("make_mask", lambda *_, **__: None),
        ("_write", lambda self, rows, buffer, new, written: None),
    ],
)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_errors_are_found(family, name, wrong, monkeypatch):
    rows = rows_of(family, 2, 30)
    monkeypatch.setattr(AttentionRows, name, wrong)
    assert max(rows.step(), rows.step()) > 1e-3


@pytest.mark.parametrize("family", KINDS)
def test_length_classes_where_the_attention_takes_them(family):
    assert takes_classes(tiny(family)) == (family != "deepseek_v3")


def test_buffers_are_little_larger_than_what_they_hold():
    """In length classes; without them, short rows take as much as the longest one."""
    lengths, live = [5, 200, 9, 187, 80, 193, 22], {}
    for has_classes in (False, True):
        rows = rows_of("gemma3_text", *lengths, has_classes=has_classes)
        for _ in range(9):
            assert rows.step() < CLOSE
        full, window = rows.batch.caches[-1], rows.batch.caches[0]
        assert full.max_size > window.max_size == WINDOW
        assert rows.batch.nbytes == full.nbytes + window.nbytes
        per_token = CacheState(rows.model).bytes_by_capacity()[inf]
        live[has_classes] = per_token * sum(rows.batch.lengths) / full.nbytes
        # A ring is not larger than what can be in it.
        assert max(b[0].shape[2] for b in window.buffers) <= RING
        for _ in range(5):
            rows.batch.leave(0)
            rows.order[0] = rows.order[-1]
            rows.order.pop()
        assert rows.step() < CLOSE
        held = per_token * sum(rows.batch.lengths) / full.nbytes
        assert held > (0.85 if has_classes else 0.3)
    assert live[False] < 0.6
    assert live[True] > 0.88


@pytest.mark.parametrize(
    ("family", "has_classes"),
    [
        ("llama", True),
        ("gemma3_text", False),
        ("gemma3_text", True),
        ("qwen3_next", True),
    ],
)
def test_rows_leave_join_and_are_extracted(family, has_classes):
    rows = rows_of(family, 3, RING + 9, 20, 11, has_classes=has_classes)
    assert rows.step([4, 2, 1, 4]) < CLOSE
    for row in (1, 0):
        # A copy that goes on alone, and comes back.
        state = rows.batch.extract(row)
        n, length = rows.order[row], state.length
        rows.batch.leave(row)
        rows.order[row] = rows.order[-1]
        rows.order.pop()
        assert rows.step() < CLOSE
        logits = state.forward(mx.array([rows.texts[n][length : length + 2]]))[0]
        expected = rows.whole[n][length : length + 2]
        assert mx.abs(logits - expected).max() < CLOSE * mx.abs(expected).max()
        assert rows.step() < CLOSE
        rows.batch.join(state)
        rows.order.append(n)
        assert rows.step() < CLOSE
    assert rows.step([1, 3, 3, 2]) < CLOSE
    for _ in range(3):
        rows.batch.leave(0)
        rows.order[0] = rows.order[-1]
        rows.order.pop()
    assert rows.step() < CLOSE


@pytest.mark.parametrize(
    ("family", "length"), [*zip(KINDS, (0, 9, 0, 9), strict=True), ("gemma3_text", 0)]
)
def test_a_row_that_was_nan_leaves_nothing(family, length):
    """A mask hides no NaN: zero times NaN is NaN."""
    rows = rows_of(family, 3, 2 * RING, 20)
    rows.batch.leave(1)
    rows.order = [0, 2]
    broken = started(rows.model, [7] * RING, RING)
    for cache in broken.layer_caches:
        name = "buffers" if isinstance(cache, AttentionRows) else "state"
        broken_state = tree_map(
            lambda part: part * mx.nan if isinstance(part, mx.array) else part,
            getattr(cache, name),
        )
        setattr(cache, name, broken_state)
    rows.batch.join(broken)
    rows.batch.leave(2)
    rows.batch.join(started(rows.model, rows.texts[1], length))
    rows.order = [0, 2, 1]
    for _ in range(2):
        assert rows.step() < CLOSE


def test_one_row_is_a_batch():
    model = noisy(tiny("qwen3_next"), 0.1)
    [text] = texts_of(1)
    whole = model(mx.array([text]))[0]
    one = OneRow(started(model, text, 5))
    one.forward(mx.array([[7] * 4]), [4])
    one.rollback([3])
    assert one.lengths == [6]
    other = started(model, [*text[:5], 7], 6)
    step = mx.array([text[6:7]])
    assert mx.allclose(one.forward(step), other.forward(step), atol=1e-5)
    batch = CacheBatch(started(model, text, 6))
    logits = batch.forward(step)
    assert mx.abs(logits[0, 0] - whole[6]).max() < CLOSE * mx.abs(whole[6]).max()
    assert batch.nbytes


# Models that compute a batch in another way than its sequences.

SHOWN = ("gemma2", "gemma3n", "plamo3", "rwkv7")


WITHOUT_MASK = {
    *("mamba", "nemotron_h", "jamba", "rwkv7", "recurrent_gemma", "baichuan_m1"),
    "olmo_hybrid",
}


@pytest.mark.parametrize(
    "family",
    [f if f in SHOWN else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES],
)
def test_ragged_batches_have_the_logits_of_their_sequences(family):
    model = member(family).eval()
    require_batchable(model)
    assert takes_padding(model) == (family not in WITHOUT_MASK)
    # As many as gemma2's heads, and more; prompts before, at and after the window.
    for lengths in ([24], [24, 2], [24, 2, WINDOW - 1]):
        pairs = list(zip(texts_of(*lengths), lengths, strict=True))
        first, *others = [started(model, *pair) for pair in pairs]
        batch = CacheBatch(first)
        for state in others:
            batch.join(state)
        alone = [started(model, *pair) for pair in pairs]
        for step in range(2 * WINDOW):
            tokens = [mx.array([[text[n + step]]]) for text, n in pairs]
            together = batch.forward(mx.concatenate(tokens))
            expected = mx.concatenate([*map(CacheState.forward, alone, tokens)])
            error = mx.abs(together - expected).max()
            assert error <= 1e-4 * mx.abs(expected).max()


@pytest.mark.parametrize("family", ["afm7", "gemma2"])
def test_batches_that_differ_from_their_sequences_are_refused(family, monkeypatch):
    """AFM reads one offset for all rows; gemma2 as mlx-lm has it mixes up its mask."""
    model = member(family).eval()
    if family == "gemma2":
        attention = type(model.layers[0].self_attn)
        monkeypatch.setattr(attention, "__call__", attention.__call__.__wrapped__)
    with pytest.raises(UserError, match="cannot decode several sequences together"):
        require_batchable(model)


def test_caches_that_hold_one_sequence_are_refused(monkeypatch):
    from mlx_lm.models.cache import ChunkedKVCache

    model = tiny_generator_model("llama")
    model.make_cache = lambda: [ChunkedKVCache(8) for _ in model.layers]
    with pytest.raises(UserError, match="a ChunkedKVCache holds one sequence only"):
        require_batchable(model)
    # The answer is kept with the model.
    monkeypatch.setattr(batch_module, "_batch_error", None)
    assert batch_error(model)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_an_empty_row_takes_a_place_before_its_first_pass(family):
    """It has no place in the buffers yet: MLX would read beyond them."""
    rows = Rows(member(family), 5, *[0] * 60)

    def buffers():
        layers = rows.batch._layers
        return [b for layer in layers for part in layer.buffers for b in part]

    assert {len(buffer) for buffer in buffers()} == {1}
    rows.batch.leave(0)
    rows.order = [rows.order[-1], *rows.order[1:-1]]
    assert all(len(buffer) >= 60 for buffer in buffers())
    assert not any(buffer.any().item() for buffer in buffers())
    assert rows.step() < 1e-4
    rows.batch.leave(3)
    assert rows.batch.lengths == [1] * 59
