"""What errors in an embedding cost, which is quantized before all else.

An error where a token is looked up goes through all blocks: what it costs is the Fisher
information of what is looked up. Where the embedding is the head too, its inputs are
added, as the loss answers to the logits; both are in nats, so nothing is left to weigh.
On data/tiny-base, its embedding alone rounded, KL was 16% less at 4 bits and 13% less
at 2 than with the inputs of the head and half as much of the identity; where it was no
head, 57% and 60% less than with the identity. Rows are told apart by clusters of like
tokens, which was worth 9% and 13% more: an error in a row counts where its token is
looked up or likely.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn

from ...models.hooks import GradientTap, capture_inputs, hook_calls, is_hidden
from .embedding_clusters import clusters
from .fisher import ForwardBackwardPass, pieces, seen_of
from .input_statistics import InputStatistics

# The share of the information that counts as alike in all directions, if it is of few
# tokens; if of more than these, it is in inverse proportion to them.
SHRINKAGE, FEW_TOKENS = 0.5, 1 << 13
# Look-ups and expected predictions of a cluster's tokens at which its own count half.
LOOK_UPS, PREDICTIONS = 300, 10
# How often every token counts as looked up besides.
UNSEEN_LOOK_UPS = 0.25


def embeddings(model: nn.Module, paths: list[str]) -> dict[str, mx.array]:
    """Weights of those of some layers that are embeddings."""
    modules = dict(model.named_modules())
    found = {path: modules[path] for path in paths}
    return {p: m.weight for p, m in found.items() if isinstance(m, nn.Embedding)}


def heads(way: ForwardBackwardPass, paths: list[str]) -> list[str]:
    """Those of some embeddings into which hidden states go as well."""
    tokens = way.parts[0][:1]
    hidden = way.blockwise.first(tokens)
    with capture_inputs(way.blockwise.model, paths) as seen:
        way.blockwise.last(tokens, hidden)
    return list(seen.rows)


def moments_of_embeddings(
    way: ForwardBackwardPass, paths: list[str], heads: list[str]
) -> dict[str, InputStatistics]:
    """What an error in the rows of embeddings costs, by path, as moments of inputs.

    Args:
        way: that has come back to the front of the first block.
    """
    found = {}
    for path, weight in embeddings(way.blockwise.model, paths).items():
        counts = _counts(way, path, len(weight))
        kinds = clusters(weight, counts)
        sizes = _each(kinds, mx.ones(len(weight)))
        squares = _of_look_ups(way, path, kinds, sizes)
        if path in heads:
            squares = squares + _of_head(way, path, kinds)
        found[path] = InputStatistics(
            squares, None, _each(kinds, counts), clusters=kinds
        )
    return found


def _counts(way: ForwardBackwardPass, path: str, size: int) -> mx.array:
    """How often the rows of an embedding are looked up, float32 [V]."""
    total = mx.zeros(size)
    for tokens, counted in zip(way.parts, way.counted, strict=True):
        seen = seen_of(counted).reshape(-1).astype(mx.float32)
        for rows in _look_ups(way, path, tokens).inputs.values():
            total = total.at[rows.reshape(-1)].add(seen)
    return total


def _each(kinds: mx.array, values: mx.array) -> mx.array:
    """Sums of values [V, ...] over each cluster [C, ...]."""
    number = kinds.max().item() + 1
    return mx.zeros((number, *values.shape[1:])).at[kinds].add(values)


def _of_look_ups(
    way: ForwardBackwardPass, path: str, kinds: mx.array, sizes: mx.array
) -> mx.array:
    """The Fisher information of what tokens of each cluster are looked up for.

    Float32 [C, K, K], a mean over all tokens: the more often a cluster is looked up,
    the more it costs.
    """
    width = embeddings(way.blockwise.model, [path])[path].shape[-1]
    found = InputStatistics.empty(width, experts=len(sizes), with_cross=False)
    for part, tokens in enumerate(way.parts[: way.back]):
        seen = seen_of(way.counted[part]).reshape(-1)
        for rows, slopes in _slopes_of_look_ups(way, path, part, tokens):
            found.add_routed(slopes, kinds[rows], seen)
    share = SHRINKAGE * min(1.0, FEW_TOKENS / max(1, found.counts.sum().item()))
    own = _shrunk(found.squares / way.tokens_back, share)
    chances = found.counts + UNSEEN_LOOK_UPS * sizes
    mean = own.sum(axis=0) * (chances / chances.sum())[:, None, None]
    return _blended(own, mean, found.counts, LOOK_UPS)


def _of_head(way: ForwardBackwardPass, path: str, kinds: mx.array) -> mx.array:
    """Second moments of a head's inputs, float32 [C, K, K], a mean over all tokens.

    Each input counts for a cluster as the loss answers to the logits of its tokens:
    p (1 - p), if p is what the model gives a token.
    """
    number = kinds.max().item() + 1
    members = (kinds[:, None] == mx.arange(number)).astype(mx.float32)
    total, counts = 0.0, 0.0
    for part, tokens in enumerate(way.parts):
        hidden = way.hidden(len(way.blockwise), part)
        for here in pieces(tokens):
            with capture_inputs(way.blockwise.model, [path]) as seen:
                logits = way.blockwise.last(tokens[here], hidden[here])
            chances = mx.softmax(logits.astype(mx.float32), axis=-1)
            chances = chances * way.counted[part][here][..., None]
            weights = (chances * (1 - chances)).reshape(-1, len(kinds)) @ members
            rows = seen.rows[path].astype(mx.float32)
            total = total + (rows.T * weights.T[:, None]) @ rows
            counts = counts + weights.sum(axis=0)
            mx.eval(total, counts)
    mean = total.sum(axis=0) / counts.sum() * counts[:, None, None]
    return _blended(total, mean, counts, PREDICTIONS) / way.tokens_counted


def _blended(own: mx.array, mean: mx.array, counts: mx.array, enough: float):
    """A cluster's own, and the less was seen of it, that of all."""
    share = (counts / (counts + enough))[:, None, None]
    return share * own + (1 - share) * mean


def _look_ups(way: ForwardBackwardPass, path: str, tokens: mx.array) -> GradientTap:
    """What an embedding is called with in front of the first block."""
    tap = GradientTap()
    with hook_calls(way.blockwise.model, [path], tap):
        way.blockwise.first(tokens)
    calls = [call for call, x in tap.inputs.items() if not is_hidden(x)]
    return GradientTap(
        inputs={k: tap.inputs[k] for k in calls},
        outputs={k: tap.outputs[k] for k in calls},
    )


def _slopes_of_look_ups(
    way: ForwardBackwardPass, path: str, part: int, tokens: mx.array
) -> Iterator[tuple[mx.array, mx.array]]:
    """The rows looked up, int [T], and slopes [T, K] by what each of them gave."""
    seen = _look_ups(way, path, tokens)

    def run(*shifts):
        given = GradientTap(dict(zip(seen.inputs, shifts, strict=True)))
        with hook_calls(way.blockwise.model, [path], given):
            return way.blockwise.first(tokens)

    shifts = [mx.zeros_like(output) for output in seen.outputs.values()]
    _, slopes = mx.vjp(run, shifts, [way.slopes(part)])
    for rows, slope in zip(seen.inputs.values(), slopes, strict=True):
        yield rows.reshape(-1), slope.reshape(-1, slope.shape[-1])


@contextmanager
def given(model: nn.Module, weights: dict[str, mx.array]) -> Iterator[None]:
    """Layers by path have other weights for a while."""
    modules = dict(model.named_modules())
    before = {path: modules[path].weight for path in weights}
    for path, weight in weights.items():
        modules[path].weight = weight.astype(before[path].dtype)
    try:
        yield
    finally:
        for path, weight in before.items():
            modules[path].weight = weight


def _shrunk(information: mx.array, share: float) -> mx.array:
    """[C, K, K], each nearer by a share to what is alike in all directions."""
    mean = mx.diagonal(information, axis1=1, axis2=2).mean(axis=1)
    same = mean[:, None, None] * mx.eye(information.shape[-1])
    return (1 - share) * information + share * same
