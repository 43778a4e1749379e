"""Caches of several sequences in one batch, and whether a model computes with them."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx

from ..errors import UserError
from ..models.loader import make_cache
from ..models.logit_errors import more_than_rounding
from .decode_loop import require_numbers
from .kv_cache import CacheState

# Two prompts of a check, which are padded to one length in a batch.
PROMPTS = [1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12]
_checked: WeakValueDictionary[int, Any] = WeakValueDictionary()


def merge(sequences: Sequence[list]) -> list:
    """The caches of sequences [B][layers] as caches of a batch, one for each layer."""
    layers = zip(*sequences, strict=True)
    return [type(caches[0]).merge(list(caches)) for caches in layers]


def require_batchable(model: Any) -> None:
    """Decode two prompts of unequal length for one step, alone and in a batch.

    Some architectures of mlx-lm apply masks or positions of one sequence to a batch.

    Raises:
        UserError: the logits differ or are NaN, or a cache holds one sequence only.
    """
    if _checked.get(id(model)) is model:
        return
    alone, sequences = [], []
    for prompt in PROMPTS:
        alone.append(CacheState(model).forward(mx.array([prompt]))[:, -1:])
        sequences.append(make_cache(model))
        model(mx.array([prompt[:-1]]), cache=sequences[-1])
    require_numbers(mx.concatenate(alone), "the model")
    last = mx.array([prompt[-1:] for prompt in PROMPTS])
    try:
        together = model(last, cache=merge(sequences))
        error = more_than_rounding(together, mx.concatenate(alone))
    except (AttributeError, TypeError, ValueError) as broken:
        error = f"not computed: {broken}"
    if error:
        raise UserError(
            "this model cannot decode several sequences together: the logits of one of "
            f"them are {error}",
            hint="generate one completion at a time",
        )
    _checked[id(model)] = model
