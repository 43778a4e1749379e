"""LongRoPE (arXiv 2402.13753): other frequencies in short sequences than in long ones.

The keys of a sequence that grows beyond the original length would have to be computed
again. lmx computes with the factors of short sequences, and refuses longer ones. mlx-lm
takes the factors of long sequences for all.
"""

import math

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError
from .rope_parameters import SCALING


class ShortLongRoPE(nn.Module):
    """Positions up to the original length.

    Args:
        dims: rotated dimensions of a head.
        frequencies: divisors of positions, float32 [dims / 2].
        scale: factor of queries and keys.
        positions: the original length.
    """

    def __init__(self, dims: int, frequencies: mx.array, scale: float, positions: int):
        super().__init__()
        self.dims = dims
        self.positions = positions
        self._frequencies = frequencies
        self._scale = scale

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotate queries or keys [batch, heads, length, head_dim].

        Raises:
            UserError: a position is beyond the original length.
        """
        if isinstance(offset, int) and offset + x.shape[-2] > self.positions:
            raise UserError(
                f"a sequence of {offset + x.shape[-2]:,} tokens needs this model's "
                f"factors of long sequences; lmx computes up to {self.positions:,}",
                hint="shorten the text, or lower max_seq_length",
            )
        return mx.fast.rope(
            x.at[..., : self.dims].multiply(self._scale),
            self.dims,
            traditional=False,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=self._frequencies,
        )


def use_short_factors(model: nn.Module, config: dict, kind: type[nn.Module]) -> None:
    """Replace mlx-lm's layers of LongRoPE, and limit the model's positions.

    Args:
        kind: mlx-lm's class of these layers.
    """
    config = config | (config.get("text_config") or {})
    scaling = config.get(SCALING) or {}
    for block in model.modules():
        if not isinstance(rope := block.get("rope"), kind):
            continue
        positions = rope.original_max_position_embeddings
        steps = mx.arange(0, rope.dim, 2, dtype=mx.float32) / rope.dim
        factors = mx.array(scaling.get("short_factor", 1.0), dtype=mx.float32)
        frequencies = factors * config["rope_theta"] ** steps
        scale = _scale(scaling, config["max_position_embeddings"], positions)
        block.rope = ShortLongRoPE(rope.dim, frequencies, scale, positions)
        model.args.max_position_embeddings = positions


def _scale(scaling: dict, longest: int, positions: int) -> float:
    """The factor of queries and keys, as transformers computes it."""
    for key in ("short_mscale", "attention_factor"):
        if scaling.get(key) is not None:
            return scaling[key]
    ratio = scaling.get("factor") or longest / positions
    return math.sqrt(1 + math.log(ratio) / math.log(positions)) if ratio > 1 else 1.0
