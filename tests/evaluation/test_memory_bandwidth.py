"""Memory bandwidth, and the bytes that a token reads."""

import mlx.core as mx
import mlx.nn as nn
from lmx import cpu
from lmx.cpu.quantized_matmul import keep_dequantized
from lmx.evaluation.memory_bandwidth import measure_memory_bandwidth, weight_bytes
from lmx.models.loader import load
from mlx.utils import tree_flatten
from tiny_checkpoints import LLAMA, QWEN3_MOE

WIDE = LLAMA | {"num_hidden_layers": 2, "max_position_embeddings": 128}


def test_bandwidth_is_that_of_memory():
    """Between a floppy disk and the fastest accelerator."""
    assert 1e7 < measure_memory_bandwidth() < 1e14


def test_weight_bytes_of_dequantized_layers_are_those_in_memory(make_checkpoint):
    loaded = load(make_checkpoint(WIDE, dtype="float32"))
    dense = weight_bytes(loaded.model, loaded.config)
    nn.quantize(loaded.model, 32, 4)
    mx.eval(loaded.model.parameters())
    cpu.enable(loaded.model)
    # 4.5 or 5 bits in place of 32.
    assert weight_bytes(loaded.model, loaded.config) < dense / 5
    if keep_dequantized(loaded.model):
        assert weight_bytes(loaded.model, loaded.config) == dense


def sizes(model) -> dict[str, int]:
    return {path: value.nbytes for path, value in tree_flatten(model.parameters())}


def test_weight_bytes_skip_untied_embeddings(make_checkpoint):
    tied = load(make_checkpoint(WIDE, dtype="float32"))
    all_bytes = sum(sizes(tied.model).values())
    assert weight_bytes(tied.model, tied.config) == all_bytes
    untied = load(make_checkpoint(WIDE, dtype="float32", tie_word_embeddings=False))
    assert weight_bytes(untied.model, untied.config) == all_bytes


def test_weight_bytes_skip_inactive_experts(make_checkpoint):
    loaded = load(make_checkpoint(QWEN3_MOE, dtype="float32"))
    of = sizes(loaded.model)
    experts = sum(size for path, size in of.items() if "switch_mlp" in path)
    others = sum(of.values()) - experts - of["model.embed_tokens.weight"]
    # Two of four experts are active.
    expected = others + experts // 2
    assert weight_bytes(loaded.model, loaded.config) == expected
