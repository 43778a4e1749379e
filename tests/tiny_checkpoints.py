"""Tiny checkpoints, written without the exporters of lmx."""

import itertools
import json
import shutil

import mlx.core as mx
import pytest
from lmx.config.model import ScratchModelConfig
from lmx.models import from_scratch
from lmx.models.loader import build_model
from mlx.utils import tree_flatten

TEXTS = [
    "the quick brown fox jumps over the lazy dog 0123456789",
    "Straße, naïve, 東京, emoji 🙂 and\ttabs\n",
    "def add(left, right):\n    return left + right\n",
] * 4
LLAMA = from_scratch.llama_config(
    ScratchModelConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
)
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "vocab_size": 320,
    "eos_token_id": [2, 0],
}


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    from_scratch.train_tokenizer(TEXTS, 320, folder)
    return folder


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory, tokenizer_folder):
    """A function from config keys to the folder of a random checkpoint."""
    folders = {}
    counter = itertools.count()

    def checkpoint(base=LLAMA, *, dtype="float16", **changes):
        key = json.dumps([base, dtype, changes], sort_keys=True)
        if key not in folders:
            folder = tmp_path_factory.mktemp("models") / f"{next(counter)}"
            shutil.copytree(tokenizer_folder, folder)
            config = base | {"torch_dtype": dtype} | changes
            (folder / "config.json").write_text(json.dumps(config))
            weights = random_weights(config, getattr(mx, dtype))
            mx.save_safetensors(
                str(folder / "model.safetensors"), weights, metadata={"format": "mlx"}
            )
            folders[key] = folder
        return folders[key]

    return checkpoint


def random_weights(config, dtype):
    """Weights with distinct logits; norms and biases differ from their defaults."""
    weights, key = {}, mx.random.key(7)
    for path, value in tree_flatten(build_model(config).parameters()):
        key, draw = mx.random.split(key)
        noise = mx.random.normal(value.shape, key=draw)
        value = 0.1 * noise if value.ndim > 1 else value + 0.1 * noise
        weights[path] = value.astype(dtype)
    return weights
