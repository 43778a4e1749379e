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
        UserError: a cache of this model holds one sequence only, or the logits differ
            or are NaN.
    """
    if _checked.get(id(model)) is model:
        return
    hint = "generate one completion at a time"
    for cache in make_cache(model):
        if not hasattr(type(cache), "merge"):
            raise UserError(
                f"this model's {type(cache).__name__} cannot hold several sequences",
                hint=hint,
            )
    alone, sequences = [], []
    for prompt in PROMPTS:
        state, caches = CacheState(model), make_cache(model)
        state.forward(mx.array([prompt[:-1]]))
        alone.append(state.forward(mx.array([prompt[-1:]])))
        model(mx.array([prompt[:-1]]), cache=caches)
        sequences.append(caches)
    require_numbers(mx.concatenate(alone), "the model")
    last = mx.array([prompt[-1:] for prompt in PROMPTS])
    try:
        together = model(last, cache=merge(sequences))
        error = more_than_rounding(together, mx.concatenate(alone))
    except (TypeError, ValueError) as broken:
        error = f"not computed: {broken}"
    if error:
        raise UserError(
            f"this model cannot decode several sequences together: the logits of a "
            f"sequence in a batch are {error}",
            hint=hint,
        )
    _checked[id(model)] = model
