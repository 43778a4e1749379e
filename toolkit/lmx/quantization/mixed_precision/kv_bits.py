"""Bits of the KV cache by layer, with the least divergence for a mean number of bits.

The divergence that every choice of bits costs is measured layer by layer: only this
layer's keys and values are rounded. A knapsack chooses the bits of all layers. The
choice and uniform bits are then measured on other tokens, and the best one that fits is
selected.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...config.quantize import KVCacheConfig
from ...data.calibration import CalibrationBatch
from ...data.sequence_mean import mean_over_sequences
from ...errors import UserError
from ...generation.kv_cache.rotation import (
    PLAIN,
    KeyRotation,
    key_rotations,
    quantized,
    rotated,
)
from ...generation.kv_cache.sequence import UNQUANTIZED, CacheState
from ...interfaces import SINGLE_PROCESS, Communicator, Logger
from ...models.loader import make_cache
from . import knapsack

CALIBRATION_TOKENS = 2048
"""Tokens for the sensitivity of layers."""
TOKENS_AT_ONCE = 512
"""Tokens per forward pass."""

Plan = Sequence[int]


@dataclass(frozen=True)
class KVLayer:
    """The cache of one layer that can be quantized.

    Attributes:
        index: of the layer.
        width: numbers per token: keys and values of all heads.
    """

    index: int
    width: int
    rotation: KeyRotation

    def bits_per_token(self, bits: int, dtype: mx.Dtype) -> int:
        """Bits of one token's keys and values, with scales and biases."""
        stored = 8 * dtype.size
        if bits == UNQUANTIZED:
            return self.width * stored
        return self.width * bits + self.width // self.rotation.group_size * 2 * stored


class TokenRounding:
    """Rounds keys and values to what a quantized cache of a layer dequantizes to."""

    def __init__(self, layer: KVLayer, bits: int):
        self._rotation = layer.rotation
        self._spec = {"bits": bits, "group_size": layer.rotation.group_size}

    def keys(self, keys: mx.array) -> mx.array:
        """Rounded keys [B, H, N, D]."""
        rounded = self._round(self._rotation.keys(keys))
        return self._rotation.original_keys(rounded)

    def values(self, values: mx.array) -> mx.array:
        """Rounded values [B, H, N, D]."""
        return rotated(self._round(rotated(values)))

    def _round(self, x: mx.array) -> mx.array:
        return mx.dequantize(*quantized(x, **self._spec), **self._spec)


class RoundedCache:
    """A full-attention cache whose keys and values are rounded when they are stored.

    Attention reads them with the fast kernels for dense keys.

    Args:
        cache: an empty cache of mlx-lm. All else is its.
        rounding: of new keys and values.
    """

    def __init__(self, cache: Any, rounding: TokenRounding):
        self._cache, self._rounding = cache, rounding

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Append N positions [B, H, N, D]; returns all, rounded."""
        rounding = self._rounding
        return self._cache.update_and_fetch(
            rounding.keys(keys), rounding.values(values)
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def choose_kv_bits(
    model: nn.Module,
    dtype: mx.Dtype,
    config: KVCacheConfig,
    calibration: CalibrationBatch,
    held_out: CalibrationBatch,
    logger: Logger,
    ranks: Communicator = SINGLE_PROCESS,
) -> tuple[list[int], dict]:
    """Choose the bits of every layer's cache.

    Args:
        model: the model that is served; unchanged on return.
        dtype: the dtype that the checkpoint stores, which is that of its cache.
        calibration: sequences for the sensitivity of layers.
        held_out: sequences for comparing the choice with uniform bits.
        ranks: the processes that divide the sequences.

    Returns:
        The bits of every layer, and facts for the report: `bits`, `selected`,
        `sensitivity` (KL in nats per token by layer and bits), and for every candidate
        KL, its standard error with sequences as clusters, and bytes per token.

    Raises:
        UserError: the cache of this model cannot be quantized, or no choice fits.
    """
    # Refuses caches that cannot be quantized.
    CacheState(model, kv_bits=8)
    layers = quantizable_layers(model)
    options = sorted(set(config.candidate_bits))
    limit = _limit(config, layers, options, dtype)
    costs = layer_sensitivities(model, layers, options, calibration, logger, ranks)
    plans = _candidate_plans(model, dtype, layers, costs, limit)
    with logger.progress(len(plans), "comparing KV-cache bits") as progress:
        trials = list(plans.values())
        measured = _divergences(
            model, layers, trials, held_out, progress.advance, ranks
        )
    candidates = {}
    for (name, plan), (kl, stderr) in zip(plans.items(), measured, strict=True):
        size = sum(layer.bits_per_token(plan[layer.index], dtype) for layer in layers)
        candidates[name] = {
            "kl": kl,
            "kl_stderr": stderr,
            "bytes_per_token": size // 8,
            "fits": size <= limit,
        }
    fitting = [name for name, facts in candidates.items() if facts["fits"]]
    best = min(fitting, key=lambda name: candidates[name]["kl"])
    dense = sum(layer.bits_per_token(UNQUANTIZED, dtype) for layer in layers) // 8
    rows = [
        [
            name,
            f"{facts['bytes_per_token']:,}",
            f"{facts['kl']:.5f}",
            f"± {facts['kl_stderr']:.5f}",
            "" if facts["fits"] else "over the budget",
        ]
        for name, facts in candidates.items()
    ]
    columns = ["KV-cache bits", "bytes per token", "KL", "error", ""]
    logger.table(f"KV cache: selected {best} ({dense:,} bytes before)", columns, rows)
    return plans[best], {
        "bits": plans[best],
        "selected": best,
        "candidates": candidates,
        "unquantized_bytes_per_token": dense,
        "sensitivity": {str(index): cost for index, cost in costs.items()},
    }


def _candidate_plans(
    model: nn.Module,
    dtype: mx.Dtype,
    layers: Sequence[KVLayer],
    costs: dict[int, dict[int, float]],
    limit: int,
) -> dict[str, list[int]]:
    """Bits of all layers by the name of the candidate: uniform, and by sensitivity."""
    options = list(costs[layers[0].index])
    items = [
        (
            np.array([layer.bits_per_token(bits, dtype) for bits in options]),
            np.array([costs[layer.index][bits] for bits in options]),
        )
        for layer in layers
    ]
    choice = knapsack.solve(items, limit)
    assert choice is not None
    count = len(make_cache(model))
    chosen = _plan(count, zip(layers, (options[c] for c in choice), strict=True))
    return {
        f"uniform {bits} bits": _plan(count, ((layer, bits) for layer in layers))
        for bits in options
        if bits != UNQUANTIZED
    } | {"by layer": chosen}


def quantizable_layers(model: nn.Module) -> list[KVLayer]:
    """The full-attention caches of the model, which grow with every token."""
    caches = make_cache(model)
    mx.eval(model(mx.zeros((1, 1), mx.int32), cache=caches))
    return [
        KVLayer(
            index,
            cache.keys.shape[1] * (cache.keys.shape[-1] + cache.values.shape[-1]),
            rotation,
        )
        for index, (cache, rotation) in enumerate(
            zip(caches, key_rotations(model), strict=True)
        )
        if rotation and type(cache).__name__ == PLAIN
    ]


def layer_sensitivities(
    model: nn.Module,
    layers: Sequence[KVLayer],
    options: Sequence[int],
    sequences: CalibrationBatch,
    logger: Logger,
    ranks: Communicator = SINGLE_PROCESS,
) -> dict[int, dict[int, float]]:
    """KL in nats per token by layer and bits, with all other layers unquantized."""
    count = len(make_cache(model))
    trials = [(x, b) for x in layers for b in options if b != UNQUANTIZED]
    plans = [_plan(count, [trial]) for trial in trials]
    with logger.progress(len(plans), "sensitivity of KV caches") as progress:
        args = model, layers, plans, sequences, progress.advance, ranks
        measured = _divergences(*args)
    costs = {layer.index: dict.fromkeys(options, 0.0) for layer in layers}
    for (layer, bits), (kl, _) in zip(trials, measured, strict=True):
        costs[layer.index][bits] = kl
    return costs


def _limit(
    config: KVCacheConfig,
    layers: Sequence[KVLayer],
    options: Sequence[int],
    dtype: mx.Dtype,
) -> int:
    """The budget: bits per token in all layers.

    Raises:
        UserError: no choice fits.
    """
    width = sum(layer.width for layer in layers)
    limit = int(config.average_bits * width)
    smallest = sum(
        min(layer.bits_per_token(bits, dtype) for bits in options) for layer in layers
    )
    if smallest > limit:
        raise UserError(
            f"no choice of KV-cache bits takes {config.average_bits:g} bits on average",
            hint=f"the smallest possible is {smallest / width:g}, scales included",
        )
    return limit


def _plan(count: int, chosen: Iterable[tuple[KVLayer, int]]) -> list[int]:
    plan = [UNQUANTIZED] * count
    for layer, bits in chosen:
        plan[layer.index] = bits
    return plan


def _divergences(
    model: nn.Module,
    layers: Sequence[KVLayer],
    plans: Sequence[Plan],
    sequences: CalibrationBatch,
    advance=lambda count: None,
    ranks: Communicator = SINGLE_PROCESS,
) -> list[tuple[float, float]]:
    """KL from the model without quantized caches by plan, and its standard error."""
    batches = sequences.parts(TOKENS_AT_ONCE)
    own, sums = list(ranks.shard(range(len(batches)))), {}
    for number in own:
        divergences = _batch_divergences(model, layers, plans, batches[number])
        # Evaluated one by one.
        sums[str(number)] = mx.array(np.stack([np.array(kl) for kl in divergences]))
        advance(len(plans) / len(own))
    sums = ranks.exchange(sums)
    rows = [np.array(sums[str(number)], np.float64) for number in range(len(batches))]
    total = np.concatenate([batch.counted.sum(axis=1) for batch in batches])
    return [mean_over_sequences(row, total) for row in np.concatenate(rows, axis=1)]


def _batch_divergences(
    model: nn.Module,
    layers: Sequence[KVLayer],
    plans: Sequence[Plan],
    batch: CalibrationBatch,
) -> Iterator[mx.array]:
    """Sums of the KL over the positions that count, [n], for every plan."""
    tokens, counted = mx.array(batch.tokens), mx.array(batch.counted)

    def predict(plan: Plan | None) -> mx.array:
        caches = make_cache(model)
        for layer in layers if plan else []:
            if plan[layer.index] != UNQUANTIZED:
                rounding = TokenRounding(layer, plan[layer.index])
                caches[layer.index] = RoundedCache(caches[layer.index], rounding)
        return nn.log_softmax(model(tokens, cache=caches).astype(mx.float32), axis=-1)

    target = predict(None)
    mx.eval(target)
    for plan in plans:
        kl = (mx.exp(target) * (target - predict(plan))).sum(axis=-1)
        yield mx.where(counted, kl, 0.0).sum(axis=-1)
