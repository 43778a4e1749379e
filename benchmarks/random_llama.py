"""Llamas with random weights, in the sizes that the benchmarks take as options."""

import argparse
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
