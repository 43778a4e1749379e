"""The cost of errors in embeddings, which are quantized before all other layers.

An error in a looked-up row goes through all blocks, so its cost is the Fisher
information of the lookup. If the embedding is also the output head, the second moments
of the head's inputs are added, weighted by the Hessian of the loss with respect to the
logits. Both are in nats.

Rows are clustered by direction, and each cluster has its own Hessian: an error in a row
matters where its token is looked up or likely to be predicted.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn

from ...models.hooks import GradientTap, capture_inputs, hook_calls, is_hidden
from ..backend import added, sum_dtype
from .fisher import (
    ForwardBackwardPass,
    logit_chunks,
    unnormalized_probabilities,
    visible_positions,
)
from .input_statistics import InputStatistics

# Share of the Fisher information that is replaced by a multiple of the identity. With
# more than FEW_TOKENS, the share is inversely proportional to the tokens.
SHRINKAGE, FEW_TOKENS = 0.5, 1 << 13
# Lookups and expected predictions at which a cluster's own statistics have weight 0.5.
HALF_LOOKUPS, HALF_PREDICTIONS = 300, 10
# Lookups that are added to the count of every token.
PRIOR_LOOKUPS = 0.25

# Number of clusters, if each then has this many rows on average.
MAX_CLUSTERS, MIN_CLUSTER_ROWS = 64, 32
KMEANS_ITERS = 10
# Limits of all clusters' second moments: as a multiple of the embedding, and elements.
MAX_RATIO, MAX_ELEMENTS = 4, 1 << 23
# Rows that decide the centers, and rows that are assigned to centers at once.
KMEANS_ROWS, ASSIGN_ROWS = 1 << 14, 1 << 13
# Lookups that are added to the count of every token for its weight in k-means.
PRIOR_COUNT = 0.1
MIN_NORM = 1e-12


def embeddings(model: nn.Module, paths: list[str]) -> dict[str, mx.array]:
    """Weights of the layers at `paths` that are embeddings."""
    modules = dict(model.named_modules())
    layers = {path: modules[path] for path in paths}
    return {p: m.weight for p, m in layers.items() if isinstance(m, nn.Embedding)}


@contextmanager
def replaced_weights(model: nn.Module, weights: dict[str, mx.array]) -> Iterator[None]:
    """Use other weights for some layers, by path, inside the context."""
    modules = dict(model.named_modules())
    original = {path: modules[path].weight for path in weights}
    for path, weight in weights.items():
        modules[path].weight = weight.astype(original[path].dtype)
    try:
        yield
    finally:
        for path, weight in original.items():
            modules[path].weight = weight


def tied_heads(fb_pass: ForwardBackwardPass, paths: list[str]) -> list[str]:
    """The embeddings that also receive hidden states, as the output head."""
    tokens = fb_pass.tokens[0][:1]
    hidden = fb_pass.blockwise.embed(tokens)
    with capture_inputs(fb_pass.blockwise.model, paths) as captured:
        fb_pass.blockwise.logits(tokens, hidden)
    return list(captured.rows)


def embedding_statistics(
    fb_pass: ForwardBackwardPass, paths: list[str], heads: list[str]
) -> dict[str, InputStatistics]:
    """Statistics of embeddings of tokens, with second moments by cluster of rows.

    Args:
        fb_pass: after its backward pass.
        heads: embeddings that are the output head too.
    """
    statistics, ranks = {}, fb_pass.ranks
    for path, weight in embeddings(fb_pass.blockwise.model, paths).items():
        tokens = fb_pass.tokens[0]
        lookups = _lookups(fb_pass, path, tokens).inputs.values()
        # The rows of a table of positions are looked up once for all sequences.
        is_of_tokens = all(rows.shape == tokens.shape for rows in lookups)
        if not is_of_tokens:
            continue
        counts = mx.zeros(len(weight))
        for tokens, counted in zip(fb_pass.tokens, fb_pass.counted, strict=True):
            visible = visible_positions(counted).reshape(-1).astype(mx.float32)
            for rows in _lookups(fb_pass, path, tokens).inputs.values():
                counts = counts.at[rows.reshape(-1)].add(visible)
        clusters = cluster_rows(weight, counts)
        sizes = _sum_by_cluster(clusters, mx.ones(len(weight)))
        # Clusters decide which sums are added, so all take those of rank 0.
        [clusters] = ranks.broadcast([clusters])
        moments = _lookup_moments(fb_pass, path, clusters, sizes)
        if path in heads:
            moments = moments + _head_moments(fb_pass, path, clusters)
        cluster_counts = _sum_by_cluster(clusters, counts)
        statistics[path] = InputStatistics(
            moments, None, cluster_counts, clusters=clusters
        )
    return statistics


def _sum_by_cluster(clusters: mx.array, values: mx.array) -> mx.array:
    """Sums of values [V, ...] over each cluster [C, ...]."""
    size = clusters.max().item() + 1
    return mx.zeros((size, *values.shape[1:])).at[clusters].add(values)


def _lookup_moments(
    fb_pass: ForwardBackwardPass, path: str, clusters: mx.array, sizes: mx.array
) -> mx.array:
    """Fisher information of the lookups of each cluster, float32 [C, K, K].

    A mean over all tokens: clusters that are looked up more often cost more.
    """
    width = embeddings(fb_pass.blockwise.model, [path])[path].shape[-1]
    sums = InputStatistics.empty(
        width, experts=len(sizes), with_cross=False, ranks=fb_pass.ranks
    )
    with sums.summed():
        for shard in fb_pass.own_shards:
            visible = visible_positions(fb_pass.counted[shard]).reshape(-1)
            tokens = fb_pass.tokens[shard]
            for rows, gradients in _lookup_gradients(fb_pass, path, shard, tokens):
                sums.add_routed(gradients, clusters[rows], visible)
    num_lookups = max(1, sums.counts.sum().item())
    shrinkage = SHRINKAGE * min(1.0, FEW_TOKENS / num_lookups)
    fisher = sums.second_moments / fb_pass.num_counted_tokens
    # Replace a share of each matrix by a multiple of the identity.
    mean = mx.diagonal(fisher, axis1=1, axis2=2).mean(axis=1)
    identity = mean[:, None, None] * mx.eye(width)
    fisher = (1 - shrinkage) * fisher + shrinkage * identity
    lookups = sums.counts + PRIOR_LOOKUPS * sizes
    mean = fisher.sum(axis=0) * (lookups / lookups.sum())[:, None, None]
    return _blend(fisher, mean, sums.counts, HALF_LOOKUPS)


def _head_moments(
    fb_pass: ForwardBackwardPass, path: str, clusters: mx.array
) -> mx.array:
    """Second moments of the head's inputs by cluster, float32 [C, K, K], a mean.

    An input is weighted by the second derivative of the loss with respect to the logits
    of the cluster's tokens: p (1 - p) with p the predicted probability.
    """
    width = embeddings(fb_pass.blockwise.model, [path])[path].shape[-1]
    num_clusters = clusters.max().item() + 1
    counts = mx.zeros(num_clusters, sum_dtype())
    totals = [mx.zeros((width, width), sum_dtype()) for _ in range(num_clusters)]
    for shard in fb_pass.own_shards:
        rows, weights = _head_inputs(fb_pass, path, shard, clusters)
        # One cluster at a time: the sums of all are as large as many tokens'
        # logits.
        for number, column in enumerate(weights.T):
            product = (rows * column[:, None]).T @ rows
            totals[number] = added(totals[number], product)
            mx.eval(totals[number])
        counts = counts + weights.sum(axis=0)
        mx.eval(counts)
    counts, *totals = fb_pass.ranks.all_sum([counts, *totals])
    total = mx.stack([each.astype(mx.float32) for each in totals])
    counts = counts.astype(mx.float32)
    mx.eval(total, counts)
    del totals
    mean = total.sum(axis=0) / counts.sum() * counts[:, None, None]
    return _blend(total, mean, counts, HALF_PREDICTIONS) / fb_pass.num_counted_tokens


def _head_inputs(
    fb_pass: ForwardBackwardPass, path: str, shard: int, clusters: mx.array
) -> tuple[mx.array, mx.array]:
    """Inputs of the head [T, K], and their weight in each cluster [T, C], float32."""
    tokens = fb_pass.tokens[shard]
    hidden = fb_pass.hidden(len(fb_pass.blockwise), shard)
    size = clusters.max().item() + 1
    members = (clusters[:, None] == mx.arange(size)).astype(mx.float32)
    inputs, weights = [], []
    for chunk in logit_chunks(tokens):
        with capture_inputs(fb_pass.blockwise.model, [path]) as captured:
            logits = fb_pass.blockwise.logits(tokens[chunk], hidden[chunk])
        probs = unnormalized_probabilities(logits)
        probs = probs / probs.sum(axis=-1, keepdims=True)
        by_cluster = (probs * (1 - probs)).reshape(-1, len(clusters)) @ members
        counted = fb_pass.counted[shard][chunk].reshape(-1, 1)
        inputs.append(captured.rows[path].astype(mx.float32))
        weights.append(by_cluster * counted)
        mx.eval(inputs[-1], weights[-1])
    return mx.concatenate(inputs), mx.concatenate(weights)


def _blend(
    moments: mx.array, mean: mx.array, counts: mx.array, half: float
) -> mx.array:
    """Moments of each cluster, blended with the mean if its count is small."""
    share = (counts / (counts + half))[:, None, None]
    return share * moments + (1 - share) * mean


def _lookups(fb_pass: ForwardBackwardPass, path: str, tokens: mx.array) -> GradientTap:
    """The calls of an embedding before the first block."""
    tap = GradientTap()
    with hook_calls(fb_pass.blockwise.model, [path], tap):
        fb_pass.blockwise.embed(tokens)
    calls = [call for call, x in tap.inputs.items() if not is_hidden(x)]
    return GradientTap(
        inputs={call: tap.inputs[call] for call in calls},
        outputs={call: tap.outputs[call] for call in calls},
    )


def _lookup_gradients(
    fb_pass: ForwardBackwardPass, path: str, shard: int, tokens: mx.array
) -> Iterator[tuple[mx.array, mx.array]]:
    """Looked-up rows, int [T], and gradients [T, K] with respect to them, by call."""
    lookups = _lookups(fb_pass, path, tokens)

    def run(*shifts):
        tap = GradientTap(dict(zip(lookups.inputs, shifts, strict=True)))
        with hook_calls(fb_pass.blockwise.model, [path], tap):
            return fb_pass.blockwise.embed(tokens)

    shifts = [mx.zeros_like(output) for output in lookups.outputs.values()]
    _, gradients = mx.vjp(run, shifts, [fb_pass.gradients(shard)])
    for rows, gradient in zip(lookups.inputs.values(), gradients, strict=True):
        yield rows.reshape(-1), gradient.reshape(-1, gradient.shape[-1])


def cluster_rows(weight: mx.array, counts: mx.array) -> mx.array:
    """The cluster of each row by direction: k-means on the unit sphere.

    Args:
        weight: [V, K].
        counts: [V], lookups of each token. Frequent tokens get finer clusters.

    Returns:
        int [V], below `MAX_CLUSTERS`. There are fewer clusters if there are few rows or
        if the second moments would be large.
    """
    size, width = weight.shape
    max_elements = min(MAX_RATIO * size * width, MAX_ELEMENTS)
    limit = min(MAX_CLUSTERS, size // MIN_CLUSTER_ROWS, max_elements // width**2)
    num_clusters = max(1, limit)
    # The most frequent rows decide.
    frequent = mx.argsort(-counts.astype(mx.float32))[:KMEANS_ROWS]
    rows, counts = _normalize(weight[frequent]), counts[frequent] + PRIOR_COUNT
    # Sampled by count, without replacement.
    scores = mx.log(counts) + mx.random.gumbel(counts.shape, key=mx.random.key(0))
    centers = rows[mx.argsort(-scores)[:num_clusters]]
    for _ in range(KMEANS_ITERS):
        assigned = _nearest(rows, centers) == mx.arange(num_clusters)[:, None]
        members = assigned * counts
        means = _normalize(members @ rows)
        centers = mx.where(members.any(axis=1, keepdims=True), means, centers)
        mx.eval(centers)
    starts = range(0, size, ASSIGN_ROWS)
    parts = (weight[start : start + ASSIGN_ROWS] for start in starts)
    clusters = mx.concatenate([_nearest(_normalize(part), centers) for part in parts])
    # Empty clusters are left out of the numbering.
    is_used = mx.zeros(num_clusters, mx.int32).at[clusters].add(1) > 0
    return (mx.cumsum(is_used) - 1)[clusters]


def _nearest(rows: mx.array, centers: mx.array) -> mx.array:
    nearest = (rows @ centers.T).argmax(axis=1)
    mx.eval(nearest)
    return nearest


def _normalize(rows: mx.array) -> mx.array:
    """Rows scaled to unit length, float32."""
    rows = rows.astype(mx.float32)
    return rows / mx.maximum(mx.linalg.norm(rows, axis=1, keepdims=True), MIN_NORM)
