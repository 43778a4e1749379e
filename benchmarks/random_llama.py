"""Models with random weights, in the sizes that the benchmarks take as options."""

import argparse
from pathlib import Path
from typing import Any


def configuration(arguments: argparse.Namespace, **settings: Any) -> dict:
    """config.json of a Llama with the sizes in `arguments`.

    Args:
        settings: fields of `ScratchModelConfig`; they override the sizes.
    """
    from lmx.config.model import ScratchModelConfig
    from lmx.models import from_scratch

    sizes = {
        "hidden_size": arguments.hidden_size,
        "intermediate_size": 3 * arguments.hidden_size,
        "num_hidden_layers": arguments.num_layers,
        "num_attention_heads": max(1, arguments.hidden_size // 64),
    }
    if "vocab_size" not in settings:
        sizes["vocab_size"] = arguments.vocab_size
    return from_scratch.llama_config(ScratchModelConfig(**sizes | settings))


def model(config: dict) -> Any:
    """The model. Its weights depend only on the sizes."""
    import mlx.core as mx
    from lmx.models import from_scratch
    from lmx.models.loader import build_model

    llama = build_model(config)
    llama.load_weights(list(from_scratch.initial_weights(config, 0).items()))
    # As after loading a checkpoint; otherwise a compiled step would sample them again.
    mx.eval(llama.parameters())
    return llama


def write(folder: Path, config: dict) -> None:
    """Write a checkpoint in bfloat16 to folder/model, one weight at a time.

    The tokenizer has 320 tokens of the vocabulary.
    """
    import mlx.core as mx
    from lmx.models import checkpoint_writer, from_scratch
    from lmx.models.loader import build_model
    from mlx.utils import tree_flatten

    weights, key = {}, mx.random.key(0)
    for name, value in tree_flatten(build_model(config).parameters()):
        if value.ndim > 1:
            key, subkey = mx.random.split(key)
            # Uniform random numbers are faster than normal ones.
            value = mx.random.uniform(-0.05, 0.05, value.shape, mx.bfloat16, key=subkey)
        weights[name] = value.astype(mx.bfloat16)
    tokenizer, target = folder / "tokenizer", folder / "model"
    tokenizer.mkdir(exist_ok=True)
    target.mkdir(exist_ok=True)
    from_scratch.train_tokenizer([Path(__file__).read_text()], 320, tokenizer)
    checkpoint_writer.write_checkpoint(target, weights, config, companions=tokenizer)
