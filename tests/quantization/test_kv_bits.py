"""KV-cache bits by layer: divergences, a planted sensitive layer, budgets."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.quantize import KVCacheConfig
from lmx.data.calibration import CalibrationBatch
from lmx.errors import UserError
from lmx.generation.kv_cache.sequence import CacheState
from lmx.interfaces import Logger
from lmx.models.loader import build_model
from lmx.quantization.mixed_precision import kv_bits
from tiny_checkpoints import LLAMA
from tiny_families import config as family_config

HEAD, LENGTH, VOCABULARY = 32, 24, 64
CONFIG = LLAMA | {
    "num_hidden_layers": 3,
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": HEAD,
}
# Bits of one number, with a scale and a bias of 16 bits for 32 of them.
FOUR, EIGHT = 5, 9


def model_with_sensitive_layer(layer: int | None):
    """The outputs of attention are small in the other layers; None = in no layer."""
    mx.random.seed(0)
    model = build_model(CONFIG)
    for block in model.layers:
        attention = block.self_attn
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.weight = 4 * projection.weight
    for index, block in enumerate(model.layers):
        if layer not in (None, index):
            block.self_attn.o_proj.weight = 0.01 * block.self_attn.o_proj.weight
    mx.eval(model.parameters())
    return model.eval()


def sequences(count: int, seed: int) -> CalibrationBatch:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCABULARY, (count, LENGTH), np.int32)
    counted = np.ones_like(tokens, bool)
    counted[:, :4] = False
    return CalibrationBatch(tokens, counted)


def choose(model, average_bits, candidate_bits=(4, 8)):
    settings = {"average_bits": average_bits, "candidate_bits": list(candidate_bits)}
    args = KVCacheConfig(**settings), sequences(4, 1), sequences(4, 2), Logger()
    return kv_bits.choose_kv_bits(model, mx.float16, *args)


def reference_divergence(model, bits, batch):
    """KL by NumPy in float64, with the quantized caches of generation."""
    kls = []
    for layer_bits in (None, bits):
        caches = [CacheState(model, kv_bits=layer_bits) for _ in batch.tokens]
        rows = [
            cache.forward(mx.array(tokens[None]))
            for cache, tokens in zip(caches, batch.tokens, strict=True)
        ]
        logits = np.array(mx.concatenate(rows), np.float64)
        logits -= logits.max(axis=-1, keepdims=True)
        kls.append(logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)))
    p, q = kls
    kl = (np.exp(p) * (p - q)).sum(axis=-1)
    by_sequence = [
        row[counts].mean() for row, counts in zip(kl, batch.counted, strict=True)
    ]
    return np.mean(by_sequence), np.std(by_sequence, ddof=1) / len(by_sequence) ** 0.5


@pytest.mark.parametrize("bits", [[4, 16, 16], [8, 5, 16], [2, 3, 2]])
def test_divergence_is_that_of_quantized_caches(bits):
    model, batch = model_with_sensitive_layer(1), sequences(5, 3)
    layers = kv_bits.quantizable_layers(model)
    assert [layer.width for layer in layers] == [2 * HEAD] * 3
    (measured,) = kv_bits._divergences(model, layers, [bits], batch)
    expected = reference_divergence(model, bits, batch)
    assert expected[0] > 1e-5
    assert measured == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("layer", range(3))
def test_a_sensitive_layer_gets_more_bits(layer):
    model = model_with_sensitive_layer(layer)
    bits, facts = choose(model, average_bits=(2 * FOUR + EIGHT) / 3 + 0.01)
    assert bits == [8 if index == layer else 4 for index in range(3)]
    assert facts["selected"] == "by layer"
    candidates, width = facts["candidates"], 2 * HEAD
    sizes = {name: value["bytes_per_token"] for name, value in candidates.items()}
    assert sizes == {
        "uniform 4 bits": 3 * width * FOUR // 8,
        "uniform 8 bits": 3 * width * EIGHT // 8,
        "by layer": width * (2 * FOUR + EIGHT) // 8,
    }
    assert facts["unquantized_bytes_per_token"] == 3 * width * 2
    kl = {name: value["kl"] for name, value in candidates.items()}
    assert kl["uniform 8 bits"] < kl["by layer"] < kl["uniform 4 bits"] / 2


def test_without_room_for_more_all_layers_get_the_smallest_bits():
    bits, facts = choose(model_with_sensitive_layer(1), average_bits=FOUR)
    assert bits == [4, 4, 4]
    assert not facts["candidates"]["uniform 8 bits"]["fits"]


def test_uniform_bits_win_if_the_choice_measures_worse(monkeypatch):
    """With wrong sensitivities, held-out tokens still reject the choice."""

    def wrong(model, layers, options, *rest):
        return {layer.index: {2: 0.0, 4: 1.0} for layer in layers}

    monkeypatch.setattr(kv_bits, "layer_sensitivities", wrong)
    bits, facts = choose(model_with_sensitive_layer(1), FOUR, candidate_bits=(2, 4))
    assert bits == [4, 4, 4]
    assert facts["selected"] == "uniform 4 bits"
    assert facts["candidates"]["by layer"]["bytes_per_token"] < 3 * 2 * HEAD * FOUR / 8


def test_errors_say_what_is_possible():
    with pytest.raises(UserError, match=r"takes 4\.5 bits on average") as error:
        choose(model_with_sensitive_layer(None), average_bits=4.5)
    assert "smallest possible is 5," in error.value.hint
    mx.random.seed(0)
    with pytest.raises(UserError, match="cannot be quantized"):
        choose(build_model(family_config("mamba")), average_bits=8)
