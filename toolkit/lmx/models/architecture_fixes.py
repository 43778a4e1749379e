"""Repairs of mlx-lm's architectures, whose training, caches and batches disagree.

A repair replaces a method of a class of mlx-lm when the first such model is built.
"""

from collections.abc import Callable
from functools import wraps

import mlx.nn as nn


def _with_axis_of_groups(attention: Callable) -> Callable:
    """Gemma 2 groups its heads on an axis that masks of a batch [B, 1, L, S] lack."""

    def call(self, x, mask=None, cache=None):
        is_batch = mask is not None and mask.ndim == 4
        lacks_axis = is_batch and self.repeats > 1
        return attention(self, x, mask[:, :, None] if lacks_axis else mask, cache)

    return call


def _with_shared_keys(trunk: Callable) -> Callable:
    """The last layers of Gemma 3n take keys and values from caches, and need some."""

    def call(self, inputs=None, cache=None, input_embeddings=None):
        cache = self.make_cache() if cache is None else cache
        return trunk(self, inputs, cache, input_embeddings)

    return call


def _with_whole_windows(make_cache: Callable) -> Callable:
    """The masks of PLaMo 3 see one position more than its caches keep."""

    def call(self):
        caches = make_cache(self)
        for cache in caches:
            if hasattr(cache, "max_size"):
                cache.max_size += 1
        return caches

    return call


# The method to replace, by module and class.
REPAIRS = {
    ("mlx_lm.models.gemma2", "Attention"): ("__call__", _with_axis_of_groups),
    ("mlx_lm.models.gemma3n", "LanguageModel"): ("__call__", _with_shared_keys),
    ("mlx_lm.models.plamo3", "Model"): ("make_cache", _with_whole_windows),
}


def repair(model: nn.Module) -> None:
    """Repair the classes of a model's modules, once in a process."""
    # mlx-lm's recurrent_gemma skips nn.Module.__init__, so it could not be frozen.
    if not hasattr(model, "_no_grad"):
        nn.Module.__init__(model)
    for kind in {type(module) for module in model.modules()}:
        method, fixed = REPAIRS.get((kind.__module__, kind.__name__), ("", None))
        original = getattr(kind, method, None)
        if fixed and not hasattr(original, "__wrapped__"):
            setattr(kind, method, wraps(original)(fixed(original)))
