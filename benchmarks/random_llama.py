"""Llamas of random weights, by the sizes that the benchmarks take as options."""

import argparse
from typing import Any


def configuration(arguments: argparse.Namespace, **settings: Any) -> dict:
    """config.json of a Llama: `hidden` wide, `layers` deep; `settings` come first.

    Args:
        settings: fields of `Fresh`.
    """
    from lmx.config.model import ScratchModelConfig
    from lmx.models import from_scratch

    sizes = {
        "hidden_size": arguments.hidden,
        "intermediate_size": 3 * arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": max(1, arguments.hidden // 64),
    }
    if "vocabulary" not in settings:
        sizes["vocabulary"] = arguments.vocabulary
    return from_scratch.llama_config(ScratchModelConfig(**sizes | settings))


def model(config: dict) -> Any:
    """The model, with weights that are a function of the sizes."""
    import mlx.core as mx
    from lmx.models import from_scratch
    from lmx.models.loader import build_model

    found = build_model(config)
    found.load_weights(list(from_scratch.initial_weights(config, 0).items()))
    # As after loading a checkpoint; else a compiled step would draw them every time.
    mx.eval(found.parameters())
    return found
