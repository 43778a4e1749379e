"""The target drafts for itself, with some of its blocks left out."""

import copy
import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ...errors import UserError
from ...models.hooks import TransformerBlocks, find_blocks
from ...models.loader import make_cache
from ..kv_cache import CacheState
from .draft_length import DraftLengthController
from .draft_model import DraftModelProposer

# Shares of the blocks to leave out that are tried.
SHARES = (0.25, 0.375, 0.5, 0.625)
REPEATS = 3


class Skipping(DraftModelProposer):
    """Drafts with the target's own weights, in fewer blocks (arXiv 2309.08168).

    Args:
        model: the target.
        skipped: numbers of the blocks to leave out; see `choose`.
    """

    def __init__(self, model: Any, skipped: Sequence[int], **options):
        super().__init__(skip_layers(model, skipped), **options)


def skip_layers(model: Any, skipped: Sequence[int]) -> Any:
    """A model that shares all weights with this one, but has fewer blocks.

    Raises:
        UserError: the model has no list of blocks, or does not run with fewer.
    """
    blocks = _blocks(model)
    way = blocks.path.split(".") if blocks.path else []
    twin = part = copy.copy(model)
    for name in way:
        part[name] = copy.copy(part[name])
        part = part[name]
    gone = set(skipped)
    part[blocks.name] = _kept(part[blocks.name], gone)
    # Some models make caches for as many blocks as their configuration names.
    twin.make_cache = lambda: _kept(make_cache(model), gone)
    try:
        CacheState(twin).forward(mx.zeros((1, 1), mx.int32))
    except (IndexError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"this model does not run with fewer blocks: {error}",
            hint="use a draft model, or lookup",
        ) from error
    return twin


def _kept(items: list, gone: set[int]) -> list:
    return [item for number, item in enumerate(items) if number not in gone]


def choose_skipped_layers(model: Any, tokens: mx.array) -> list[int]:
    """The blocks to leave out for most speed, by measurement on tokens [1, L].

    Blocks go in the order of how little the model's predictions miss each alone; how
    many go, by the predicted speed-up from the overlap of both distributions and the
    measured times of one token. An empty list: nothing pays.

    Raises:
        UserError: the model has no list of blocks.
    """
    order, target = rank_layers(model, tokens), _probabilities(model, tokens)
    count = len(order)
    plain, rows = _seconds(model, 1), {k: _seconds(model, k + 1) for k in (1, 2, 4)}
    best, chosen = 1.0, []
    for skipped in sorted({max(1, round(share * count)) for share in SHARES}):
        draft = skip_layers(model, order[:skipped])
        rate, cost = _overlap(target, draft, tokens), _seconds(draft, 1)
        for guesses, seconds in rows.items():
            controller = DraftLengthController(max_draft_tokens=guesses)
            controller.stood = [rate] * guesses
            controller.tried = [1.0] * guesses
            speedup = controller.tokens(guesses) * plain / (seconds + guesses * cost)
            if speedup > best:
                best, chosen = speedup, sorted(order[:skipped])
    return chosen


def rank_layers(model: Any, tokens: mx.array) -> list[int]:
    """Numbers of the blocks, the one whose lack changes least on tokens [1, L] first.

    Raises:
        UserError: the model has no list of blocks, or does not run with fewer.
    """
    blocks, target = _blocks(model), _probabilities(model, tokens)
    overlaps = {
        number: _overlap(target, skip_layers(model, [number]), tokens)
        for number in range(len(blocks.trunk[blocks.name]))
    }
    return sorted(overlaps, key=overlaps.get, reverse=True)


def _blocks(model: Any) -> TransformerBlocks:
    blocks = find_blocks(model)
    if blocks is None:
        raise UserError(
            "this model has no list of blocks to leave some out",
            hint="use a draft model, or lookup",
        )
    return blocks


def _probabilities(model: Any, tokens: mx.array) -> mx.array:
    return mx.softmax(model(tokens).astype(mx.float32), axis=-1)


def _overlap(target: mx.array, draft: Any, tokens: mx.array) -> float:
    """The share of guesses that would stand: sum min(p, q), on average."""
    shared = mx.minimum(target, _probabilities(draft, tokens))
    return shared.sum(axis=-1).mean().item()


def _seconds(model: Any, rows: int) -> float:
    """Of a forward pass of some tokens, the shortest of some."""

    times = []
    session = CacheState(model)
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        mx.eval(session.forward(mx.zeros((1, rows), mx.int32)))
        times.append(time.perf_counter() - start)
    return min(times[1:])
