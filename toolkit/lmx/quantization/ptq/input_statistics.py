"""Statistics of layer inputs on calibration tokens.

Asymmetric calibration compensates for the error of earlier layers. X is the input of a
layer in the quantized model, Y its input in the full-precision model, and D the error
of the residual stream that the layer adds to. The output error is E = (Y - X) W' + D,
and the target W + E'X H^-1 removes the part of it that is linear in X (GPTAQ, arXiv
2504.02692; QEP, arXiv 2505.11695; with the residual stream, arXiv 2509.06297).

To avoid overfitting, the correction is fitted on one half of the tokens and tried on
the other half. It is scaled by the strength that minimizes the error there.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import mlx.core as mx

from ...interfaces import SINGLE_PROCESS, Communicator
from ..backend import added, sum_dtype
from .hessian import Hessian, damped

# Rows of a weight that the correction strength is estimated on, spread over all rows.
STRENGTH_ROWS = 256
# Dampening of that estimate. It is less than that of the correction itself, so the
# strength is lower: on SmolLM2 that lowers the KL, most on other text than this.
STRENGTH_DAMPENING_FRAC = 0.01


@dataclass(frozen=True)
class CalibrationShard:
    """Inputs of a layer on some tokens; see `InputStatistics.add_inputs`.

    Attributes:
        start: number of inputs in all shards before this one.
    """

    start: int
    x: mx.array
    y: mx.array
    errors: mx.array | None
    weights: mx.array | None

    def split(self, count: int) -> "tuple[CalibrationShard, CalibrationShard]":
        """The first `count` inputs, and the others; of a shard that has fewer, all."""
        arrays = self.x, self.y, self.errors, self.weights
        count = min(max(0, count), len(self.x))
        first, rest = (
            [None if array is None else array[part] for array in arrays]
            for part in (slice(count), slice(count, None))
        )
        start = self.start + count
        return CalibrationShard(self.start, *first), CalibrationShard(start, *rest)


@dataclass
class InputStatistics:
    """Sums over inputs X of the quantized model and Y of the full-precision model.

    Attributes:
        second_moments: X'X, float32 [K, K]; for a mixture of experts [E, K, K]; for
            clusters of rows [C, K, K].
        cross_moments: X'(Y - X), float32 [K, K]. None without a full-precision stream.
        compared_moments: X'X over the inputs that `cross_moments` sums over.
        counts: number of inputs; for a mixture [E].
        residual_moments: D'X, float32 [N, K], with D the error of the residual stream.
            None if the layer does not add to it.
        correction_strength: by path, the share of the correction to apply, 0 to 1.
        output_fisher: by path, the Fisher information of the layer outputs, float32
            [N, N], where it was estimated.
        clusters: int [N], the cluster of each row of the weight. None = no clusters.
        ranks: the processes that share the inputs.
    """

    second_moments: mx.array
    cross_moments: mx.array | None
    counts: mx.array
    compared_moments: mx.array | None = None
    residual_moments: mx.array | None = None
    correction_strength: dict[str, float] = field(default_factory=dict)
    output_fisher: dict[str, mx.array] = field(default_factory=dict)
    clusters: mx.array | None = None
    ranks: Communicator = SINGLE_PROCESS

    @classmethod
    def empty(
        cls,
        width: int,
        *,
        experts: int | None,
        with_cross: bool,
        residual_width: int | None = None,
        ranks: Communicator = SINGLE_PROCESS,
    ) -> "InputStatistics":
        """Sums over no inputs.

        Args:
            residual_width: of the residual stream that the layer adds to. None = none.
        """
        shape = (width, width) if experts is None else (experts, width, width)
        counts = mx.zeros(shape[:-2], mx.int32)
        statistics = cls(mx.zeros(shape), None, counts, ranks=ranks)
        if with_cross:
            statistics.cross_moments = mx.zeros(shape)
        if residual_width is not None:
            statistics.residual_moments = mx.zeros((residual_width, width))
        return statistics

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Sum what every process adds inside the context, at its end.

        The sums before it are those of all processes already.
        """
        for name, value in self._sums.items():
            # Rank 0 carries the sums before it on.
            value = value if self.ranks.is_first else mx.zeros_like(value)
            self._set(name, value, sum_dtype())
        yield
        sums = self._sums
        totals = self.ranks.all_sum(list(sums.values()))
        # One after the other, so that the copies of one sum are in memory at a time.
        for name in [*sums]:
            del sums[name]
            dtype = mx.int32 if name == "counts" else mx.float32
            self._set(name, totals.pop(0), dtype)

    def _set(self, name: str, value: mx.array, dtype: mx.Dtype) -> None:
        value = value.astype(dtype)
        mx.eval(value)
        setattr(self, name, value)

    def _add_to(self, name: str, product: mx.array) -> None:
        setattr(self, name, added(getattr(self, name), product))
        mx.eval(getattr(self, name))

    @property
    def _sums(self) -> dict[str, mx.array]:
        names = "second_moments", "cross_moments", "residual_moments", "counts"
        sums = {name: getattr(self, name) for name in names}
        return {name: value for name, value in sums.items() if value is not None}

    def add_inputs(
        self,
        x: mx.array,
        y: mx.array | None = None,
        errors: mx.array | None = None,
        weights: mx.array | None = None,
    ) -> None:
        """Add inputs [T, K] of both models.

        Args:
            errors: error of the residual stream [T, N].
            weights: of the tokens, [T]. None = all 1.
        """
        x = x.astype(mx.float32)
        scaled = x if weights is None else x * mx.sqrt(weights)[:, None]
        # Evaluated one after the other, so that one product is in memory at a time.
        self._add_to("second_moments", scaled.T @ scaled)
        del scaled
        self._add_to("counts", mx.array(len(x)))
        left = (x if weights is None else x * weights[:, None]).T
        if y is not None:
            self._add_to("cross_moments", left @ (y.astype(mx.float32) - x))
        if errors is not None:
            self._add_to("residual_moments", (left @ errors.astype(mx.float32)).T)

    def add_routed(
        self, x: mx.array, experts: mx.array, visible: mx.array | None = None
    ) -> None:
        """Add inputs [T, K] to the expert of each, int [T].

        Args:
            visible: bool, False for tokens to leave out. It may have fewer entries than
                `x` if each token has several inputs. None = all True.
        """
        num_experts = len(self.second_moments)
        if visible is not None and not visible.all().item():
            visible = mx.repeat(visible, len(x) // len(visible))
            # They go to one more expert, so that no shape depends on a value.
            experts = mx.where(visible, experts, num_experts)
        order = mx.argsort(experts)
        x, sorted_experts = x.astype(mx.float32)[order], experts[order]
        bounds = mx.arange(num_experts + 1)[:, None]
        ends = (sorted_experts[None] < bounds).sum(axis=1).tolist()
        products = []
        for start, end in pairwise(ends):
            rows = x[start:end]
            products.append(rows.T @ rows)
        product = mx.stack(products)
        del products
        self._add_to("second_moments", product)
        self._add_to("counts", mx.array(ends[1:]) - mx.array(ends[:-1]))

    def add_compared(
        self,
        shards: Iterable[CalibrationShard],
        num_inputs: int,
        weights: dict[str, mx.array],
    ) -> None:
        """Add shards with inputs of both models to empty statistics.

        The correction strengths are estimated from them. Shards that are added later
        have inputs of the quantized model only.

        Args:
            shards: of this process, in their order.
            num_inputs: in the shards of all processes together.
            weights: [N, K], by path, of the layers that share the input.
        """
        half, shards, rest = num_inputs // 2, iter(shards), None
        with self.summed():
            for shard in shards:
                first, rest = shard.split(half - shard.start)
                self._add_shard(first)
                if len(rest.x):
                    break
        # Of the inputs so far; all layers share it.
        moments = self.second_moments
        hessian = damped(moments, len(moments), STRENGTH_DAMPENING_FRAC)
        del moments
        estimates = {
            path: _CorrectionStrength(weight, self, hessian)
            for path, weight in weights.items()
        }
        with self.summed():
            if rest is not None:
                self._add_shard(rest)
            for shard in shards:
                self._add_shard(shard)
        strengths = {path: e.strength(self) for path, e in estimates.items()}
        self.correction_strength = strengths
        self.compared_moments = self.second_moments

    def _add_shard(self, shard: CalibrationShard) -> None:
        if len(shard.x):
            self.add_inputs(shard.x, shard.y, shard.errors, shard.weights)


@dataclass(frozen=True)
class OutputError:
    """The error of a layer's outputs caused by earlier layers.

    The moments are scaled as the Hessian.

    Attributes:
        hessian: of the inputs that the moments sum over. Rare inputs can be a thousand
            times larger than others, so that a Hessian of other inputs will not do.
        cross_moments: X'(Y - X), float32 [K, K].
        residual_moments: D'X, float32 [N, K]. None if the layer does not add to the
            residual stream.
        strength: share of the correction to apply, 0 to 1.
    """

    hessian: Hessian
    cross_moments: mx.array
    residual_moments: mx.array | None
    strength: float

    def correction(self, weight: mx.array, rows: slice | mx.array) -> mx.array:
        """What to add to some rows [n, K] of the weight, float32."""
        return self.strength * self.hessian.solve(self.moments(weight, rows))

    def moments(self, weight: mx.array, rows: slice | mx.array) -> mx.array:
        """E'X for some rows [n, K] of the weight."""
        moments = weight.astype(mx.float32) @ self.cross_moments.T
        if self.residual_moments is not None:
            moments = moments + self.residual_moments[rows]
        return moments


class _CorrectionStrength:
    """The correction that the first half of the tokens gives, for some rows.

    The second half then shows how much of it to apply.
    """

    def __init__(self, weight: mx.array, statistics: InputStatistics, hessian: Hessian):
        self._rows = mx.arange(0, len(weight), max(1, len(weight) // STRENGTH_ROWS))
        self._weight = weight[self._rows]
        moments = statistics.second_moments
        # The scale of the Hessian. Both sums of `_gain_and_cost` are on it too.
        self._mean = mx.diagonal(moments).mean().item() or 1.0
        self._hessian = hessian
        self._correction = hessian.solve(self._error_moments(statistics) / self._mean)
        self._gain, self._cost = self._gain_and_cost(statistics)
        mx.eval(self._correction)

    def strength(self, statistics: InputStatistics) -> float:
        """The strength for the correction that all tokens give.

        Twice the tokens have half the noise: if a is best for the correction of one
        half, 2a / (1 + a) is best for the correction of both.
        """
        gain, cost = self._gain_and_cost(statistics)
        gain, cost = gain - self._gain, cost - self._cost
        best = min(1.0, max(0.0, gain / cost)) if cost > 0 else 0.0
        return 2 * best / (1 + best)

    def _error_moments(self, statistics: InputStatistics) -> mx.array:
        moments = statistics.cross_moments, statistics.residual_moments
        error = OutputError(self._hessian, *moments, strength=1.0)
        return error.moments(self._weight, self._rows)

    def _gain_and_cost(self, statistics: InputStatistics) -> tuple[float, float]:
        """<C, E'X> and tr(C X'X C') of the correction C."""
        correction = self._correction
        gain = (correction * self._error_moments(statistics)).sum() / self._mean
        product = (correction @ statistics.second_moments) * correction
        cost = product.sum() / self._mean
        return gain.item(), cost.item()
