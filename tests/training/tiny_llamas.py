"""Small Llama models for exact comparisons, in every training mode."""

import mlx.core as mx
import numpy as np
from lmx.config.lora import LoRAConfig
from lmx.config.model import ScratchModelConfig
from lmx.config.qat import QATConfig
from lmx.data.batching import Batch
from lmx.models import from_scratch
from lmx.models.loader import build_model
from lmx.models.lora import lora_model
from lmx.quantization.qat.fake_quant import FakeQuant
from lmx.quantization.target_layers import select_layers
from mlx.utils import tree_map
from tiny_families import changed, config

VOCABULARY = 320
MODES = ("full", "lora", "qat", "lora-qat", "frozen")
# These modes also train the quantization grids; the last trains only the grids.
GRID_MODES = ("lsq-qat", "lsq-lora-qat")


def llama_settings(**changes) -> dict:
    """The config of a model."""
    shape = ScratchModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    settings = from_scratch.llama_config(shape) | {"tie_word_embeddings": True}
    return settings | changes


def llama(mode="full", *, dropout=0.0, **changes):
    """A model and its fake quantization, or None."""
    mx.random.seed(3)
    model = build_model(llama_settings(**changes))
    model.update(tree_map(lambda v: 1.5 * v, model.parameters()))
    if "lora" in mode:
        attach(model, dropout=dropout, merged="qat" in mode)
    if mode == "frozen":
        model.freeze()
        model.layers[1].unfreeze()
    if "qat" not in mode:
        return model, None
    grid = "lsq" if mode.startswith("lsq") else "minmax"
    fake_quant = QATConfig(bits=4, group_size=32, quantizer=grid)
    specs = select_layers(model, fake_quant).specs
    return model, FakeQuant(model, specs, mx.float32, fake_quant)


def family(name: str):
    """A model of another family."""
    mx.random.seed(1)
    return build_model(changed(config(name), {"vocab_size": VOCABULARY}))


def attach(model, *, dropout, merged):
    adapter = LoRAConfig(rank=4, dropout=dropout, target_modules=["*"])
    lora_model.attach(model, adapter, seed=0, merged=merged)
    for layer in lora_model.adapted_layers(model).values():
        layer.lora_b = 0.1 * mx.random.normal(layer.lora_b.shape)


def tokens_of(sequences=3, length=11, *, seed=0) -> Batch:
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, VOCABULARY, (sequences, length + 1)).astype(np.int32)
    mask = generator.random((sequences, length)) < 0.6
    return Batch(mx.array(tokens), mx.array(mask), ("rows.jsonl:1",))
