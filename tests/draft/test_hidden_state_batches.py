"""Batches of drafters: hidden states of the target, cached on disk or not."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.draft.dataset import DistillationBatches
from lmx.draft.hidden_states import HiddenStateBatches, HiddenStateRecorder
from lmx.generation.completions import completion_example
from lmx.interfaces import Logger
from lmx.models.hooks import forward_with_hidden_states
from lmx.models.loader import build_model
from tiny_checkpoints import LLAMA

LAYERS = (0, 1)


class ListLogger(Logger):
    def __init__(self):
        super().__init__()
        self.lines = []

    def info(self, message):
        self.lines.append(message)


@pytest.fixture
def target():
    mx.random.seed(0)
    return build_model(LLAMA | {"num_hidden_layers": 2})


def batches(target, max_bytes, *, key="target", layers=LAYERS, logger=None, top_k=4):
    examples = [
        completion_example([3, 4, 5], [number, 7, 8, 9], f"line {number}")
        for number in range(10, 16)
    ]
    recorder = HiddenStateRecorder(target, layers)
    predictions = DistillationBatches(
        examples,
        recorder,
        key=key,
        max_seq_length=16,
        tokens=32,
        top_k=top_k,
        seed=0,
        logger=Logger(),
    )
    width = LLAMA["hidden_size"]
    return HiddenStateBatches(
        predictions,
        recorder,
        width=width,
        key=key,
        max_bytes=max_bytes,
        logger=logger or Logger(),
    )


def test_cached_and_computed_states_are_those_of_the_target(target, monkeypatch):
    cached, computed = batches(target, 1e9), batches(target, 0)
    assert cached.digest == computed.digest
    for step in range(2 * len(cached)):
        batch, other = cached(step), computed(step)
        assert batch.tokens.tolist() == other.tokens.tolist()
        expected = forward_with_hidden_states(target, batch.tokens[:, :-1], LAYERS)[1]
        assert mx.allclose(other.target[-1], expected, atol=1e-6)
        # The cache has 16 bits per value.
        assert mx.allclose(batch.target[-1], expected, rtol=2e-3, atol=2e-3)
    # Another target, or other blocks, are another entry of the cache.
    assert batches(target, 1e9, layers=(1,)).digest != cached.digest

    def fail(*_, **__):
        raise AssertionError("the target runs again")

    monkeypatch.setattr("lmx.draft.hidden_states.forward_with_hidden_states", fail)
    again = batches(target, 1e9)
    assert mx.array_equal(again(0).target[-1], cached(0).target[-1])
    with pytest.raises(AssertionError, match="runs again"):
        batches(target, 1e9, key="another")


def test_damaged_states_are_computed_again(target, tmp_path, monkeypatch):
    monkeypatch.setenv("LMX_CACHE", str(tmp_path))
    expected = batches(target, 1e9)
    states = [np.array(batch.target[-1]) for batch in expected]
    file = next((tmp_path / "hidden_states").rglob("states.safetensors"))
    data = bytearray(file.read_bytes())
    data[-3] ^= 255
    file.write_bytes(bytes(data))
    again = batches(target, 1e9)
    for index, batch in enumerate(again):
        assert np.array_equal(batch.target[-1], states[index])


def test_large_values_are_stored_as_bfloat16(target):
    target.model.layers[0].mlp.down_proj.weight *= 1e7
    cached = batches(target, 1e9, key="large")
    states = cached(0).target[-1]
    assert mx.abs(states).max().item() > 65504
    assert mx.isfinite(states).all().item()


def test_size_is_stated_and_limited(target):
    logger = ListLogger()
    batches(target, 1e9, logger=logger)
    batches(target, 1, logger=logger)
    first, second = (line for line in logger.lines if line.startswith("hidden states"))
    assert first.endswith("GB, cached on disk")
    assert second.endswith("GB, computed in every step")


@pytest.mark.parametrize(("max_bytes", "top_k"), [(1e9, 4), (0, None)])
def test_predictions_and_states_take_one_forward_pass(
    target, monkeypatch, max_bytes, top_k
):
    calls = []

    def counted(model, tokens, layer_ids):
        calls.append(tokens)
        return forward_with_hidden_states(model, tokens, layer_ids)

    monkeypatch.setattr("lmx.draft.hidden_states.forward_with_hidden_states", counted)
    key = f"one pass {top_k}"
    made = batches(target, max_bytes, key=key, top_k=top_k)
    for batch in made:
        expected = forward_with_hidden_states(target, batch.tokens[:, :-1], LAYERS)
        assert mx.allclose(batch.target[-1], expected[1], rtol=2e-3, atol=2e-3)
        if top_k is None:
            logits = expected[0] - mx.logsumexp(expected[0], axis=-1, keepdims=True)
            assert mx.allclose(batch.target[0], logits, atol=1e-5)
    assert len(calls) == len(made)


@pytest.mark.parametrize("top_k", [4, None])
def test_first_access_without_a_cache_has_the_states_of_its_batch(target, top_k):
    # Predictions of all batches are computed before, not on this access.
    computed = batches(target, 0, key=f"first {top_k}", top_k=top_k)
    assert len(computed) > 1
    batch = computed[0]
    expected = forward_with_hidden_states(target, batch.tokens[:, :-1], LAYERS)[1]
    assert mx.allclose(batch.target[-1], expected, atol=1e-6)
