"""LongRoPE (arXiv 2402.13753): other frequencies in short sequences than in long ones.

The keys of a sequence that grows beyond the original length would have to be computed
again. lmx computes with the factors of short sequences, and refuses longer ones. mlx-lm
takes the factors of long sequences for all.
"""

import math

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError
from .rope_parameters import LONG, ORIGINAL, SCALING, rope_type


def check_length(config: dict, tokens: int) -> None:
    """Refuse a sequence that needs the factors of long ones.

    Raises:
        UserError: naming the original length of the model.
    """
    config = config | (config.get("text_config") or {})
    scaling = config.get(SCALING) or {}
    original = config.get(ORIGINAL) or scaling.get(ORIGINAL)
    if rope_type(scaling) in LONG and tokens > original:
        raise UserError(
            f"a sequence of {tokens:,} tokens needs this model's factors of long "
            f"sequences; lmx computes up to {original:,}",
            hint="shorten the text, or lower max_seq_length",
        )


def use_short_factors(model: nn.Module, config: dict, kind: type[nn.Module]) -> None:
    """Change mlx-lm's layers of LongRoPE, and limit the model's positions.

    Args:
        kind: mlx-lm's class of these layers.
    """

    class ShortRoPE(kind):
        def __call__(self, x, offset=0):
            if isinstance(offset, int):
                check_length(config, offset + x.shape[-2])
            return super().__call__(x, offset)

    config = config | (config.get("text_config") or {})
    scaling = config.get(SCALING) or {}
    for rope in [module for module in model.modules() if type(module) is kind]:
        positions = rope.original_max_position_embeddings
        steps = mx.arange(0, rope.dim, 2, dtype=mx.float32) / rope.dim
        factors = mx.array(scaling.get("short_factor", 1.0), dtype=mx.float32)
        rope._freqs = factors * config["rope_theta"] ** steps
        ratio = scaling.get("factor") or config["max_position_embeddings"] / positions
        # As transformers computes it.
        default = math.sqrt(1 + math.log(max(ratio, 1)) / math.log(positions))
        given = (scaling.get(key) for key in ("short_mscale", "attention_factor"))
        rope._scale = next((value for value in given if value is not None), default)
        rope.__class__ = ShortRoPE
        model.args.max_position_embeddings = positions
