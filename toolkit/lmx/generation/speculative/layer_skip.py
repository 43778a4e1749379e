"""Self-speculative decoding: the target drafts with some of its layers skipped.

As in Draft & Verify (arXiv 2309.08168), without training.
"""

import copy
import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ...errors import UserError
from ...models.hooks import TransformerBlocks, find_blocks
from ...models.loader import make_cache
from ..kv_cache.sequence import CacheState
from .draft_length import DraftLengthController

# Shares of the layers that may be skipped.
SKIP_RATIOS = (0.25, 0.375, 0.5, 0.625)
DRAFT_LENGTHS = (1, 2, 4)
REPEATS = 3


def skip_layers(model: Any, skipped: Sequence[int]) -> Any:
    """A model with fewer layers that shares all weights with this one.

    Raises:
        UserError: the model has no list of layers, or does not run with fewer.
    """
    blocks = _find_blocks(model)
    draft = trunk = copy.copy(model)
    for name in blocks.path.split(".") if blocks.path else []:
        trunk[name] = copy.copy(trunk[name])
        trunk = trunk[name]
    trunk[blocks.name] = _without(trunk[blocks.name], skipped)
    # Some models make as many caches as their configuration has layers.
    draft.make_cache = lambda: _without(make_cache(model), skipped)
    try:
        CacheState(draft).forward(mx.zeros((1, 1), mx.int32))
    except (IndexError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"this model does not run with fewer layers: {error}",
            hint="use a draft model, or prompt-lookup",
        ) from error
    return draft


def _without(items: list, skipped: Sequence[int]) -> list:
    return [item for index, item in enumerate(items) if index not in skipped]


def choose_skipped_layers(model: Any, tokens: mx.array) -> list[int]:
    """The layers to skip for the best predicted speed-up on tokens [1, L].

    Layers are ranked by their effect on the predictions. The number of skipped layers
    maximizes the speed-up that follows from the acceptance rate and the measured
    forward times. An empty list means that no speed-up is expected.

    Raises:
        UserError: the model has no list of layers.
    """
    order, target = rank_layers(model, tokens), _probabilities(model, tokens)
    standard_seconds = _forward_seconds(model, 1)
    verify_seconds = {k: _forward_seconds(model, k + 1) for k in DRAFT_LENGTHS}
    best_speedup, best_layers = 1.0, []
    for count in sorted({max(1, round(ratio * len(order))) for ratio in SKIP_RATIOS}):
        draft = skip_layers(model, order[:count])
        acceptance_rate = _acceptance_rate(target, draft, tokens)
        draft_seconds = _forward_seconds(draft, 1)
        for length, seconds in verify_seconds.items():
            controller = DraftLengthController(max_draft_tokens=length)
            controller.accepted = [acceptance_rate] * length
            controller.proposed = [1.0] * length
            tokens_per_round = controller.expected_tokens(length)
            round_seconds = seconds + length * draft_seconds
            speedup = tokens_per_round * standard_seconds / round_seconds
            if speedup > best_speedup:
                best_speedup, best_layers = speedup, sorted(order[:count])
    return best_layers


def rank_layers(model: Any, tokens: mx.array) -> list[int]:
    """Layer indices, ordered by how little skipping them changes the predictions.

    Args:
        tokens: int32 [1, L].

    Raises:
        UserError: the model has no list of layers, or does not run with fewer.
    """
    blocks, target = _find_blocks(model), _probabilities(model, tokens)
    rates = {
        layer: _acceptance_rate(target, skip_layers(model, [layer]), tokens)
        for layer in range(len(blocks.trunk[blocks.name]))
    }
    return sorted(rates, key=rates.get, reverse=True)


def _find_blocks(model: Any) -> TransformerBlocks:
    blocks = find_blocks(model)
    if blocks is None:
        raise UserError(
            "layers cannot be skipped: this model has no list of layers",
            hint="use a draft model, or prompt-lookup",
        )
    return blocks


def _probabilities(model: Any, tokens: mx.array) -> mx.array:
    return mx.softmax(model(tokens).astype(mx.float32), axis=-1)


def _acceptance_rate(target: mx.array, draft: Any, tokens: mx.array) -> float:
    """The mean of sum min(p, q) over all positions."""
    shared = mx.minimum(target, _probabilities(draft, tokens))
    return shared.sum(axis=-1).mean().item()


def _forward_seconds(model: Any, num_tokens: int) -> float:
    """The shortest measured forward pass over `num_tokens` tokens."""
    times = []
    cache = CacheState(model)
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        mx.eval(cache.forward(mx.zeros((1, num_tokens), mx.int32)))
        times.append(time.perf_counter() - start)
    return min(times[1:])
