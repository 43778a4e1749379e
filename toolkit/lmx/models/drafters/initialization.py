"""Initial weights of a drafter: those of its target's last blocks, where they fit.

Short trainings end at a lower loss than from random weights.
"""

import mlx.core as mx
import mlx.nn as nn

from ..hooks import find_blocks
from ..quantized_layers import dequantized_weight, is_quantized

# Scale of random weights for inputs that the target's block does not have.
NEW_INPUT_SCALE = 0.1


def initialize_from_target(
    target: nn.Module, fc: nn.Linear, layers: list[nn.Module], norm: nn.Module
) -> None:
    """Copy what has the same name and size in the target; the rest stays as it is.

    Args:
        fc: joins the hidden states of several blocks; at the start it passes on the
            last of them, and little of the others.
        layers: as many of the target's last blocks are copied.
        norm: the norm before the LM head.
    """
    blocks = find_blocks(target)
    last_blocks = blocks.trunk[blocks.name][-len(layers) :]
    for layer, block in zip(layers, last_blocks, strict=False):
        _copy_block(layer, block)
    final_norm = getattr(blocks.trunk, "norm", None)
    if type(final_norm) is type(norm):
        norm.weight = mx.array(final_norm.weight)
    width = len(fc.weight)
    others = fc.weight.shape[1] - width
    scaled = NEW_INPUT_SCALE * fc.weight[:, :others]
    fc.weight = mx.concatenate([scaled, mx.eye(width, dtype=fc.weight.dtype)], axis=1)


def _copy_block(layer: nn.Module, block: nn.Module) -> None:
    sources = dict(block.named_modules())
    if "hidden_norm" in layer:
        # The other norm is that of the token embeddings, which blocks do not read.
        sources["hidden_norm"] = sources.pop("input_layernorm", None)
    for path, module in layer.named_modules():
        source = sources.get(path)
        if "weight" not in module or source is None or "weight" not in source:
            continue
        weight = dequantized_weight(source) if is_quantized(source) else source.weight
        rows, columns = module.weight.shape[0], module.weight.shape[-1]
        if weight.shape == module.weight.shape:
            module.weight = mx.array(weight)
        elif weight.shape == (rows, columns // 2):
            # The first half of the inputs is the token embedding.
            new = NEW_INPUT_SCALE * module.weight[:, : columns // 2]
            module.weight = mx.concatenate([new, weight.astype(new.dtype)], axis=1)
