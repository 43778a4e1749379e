"""TODO."""

from dataclasses import dataclass, field
from itertools import pairwise

import mlx.core as mx


def sampled_label_loss(
    logits: mx.array, key: mx.array, counted: mx.array | None = None
) -> mx.array:
    """The loss, summed up, of tokens drawn from logits [..., vocabulary] themselves.

    Args:
        counted: bool [...], True where a position counts; None = everywhere.
    """
    logits = logits.astype(mx.float32)
    drawn = mx.random.categorical(mx.stop_gradient(logits), key=key)
    chosen = mx.take_along_axis(logits, drawn[..., None], axis=-1)
    losses = mx.logsumexp(logits, axis=-1) - chosen[..., 0]
    return (losses if counted is None else mx.where(counted, losses, 0.0)).sum()


@dataclass
class InputStatistics:
    """Sums over inputs X of the quantized model and Y of the full-precision one.

    Attributes:
        squares: X'X, float32 [K, K]; of a mixture [E, K, K].
        cross: X'(Y - X), float32 [K, K], if there is a Y.
        counts: rows summed up; of a mixture [E].
        residual: D'X, float32 [N, K], of what the residual stream has lost where the
            layer adds to it; None = it adds to none.
        shares: by path how far layers are to make up for what they miss; see
            `making_up`.
        answers: of layers by path the Fisher information of what comes out of them,
            float32 [N, N], as far as it is known.
        clusters: int [N], which of squares [C, K, K] each row of the weight has; None =
            all have the same, [K, K].
    """

    squares: mx.array
    cross: mx.array | None
    counts: mx.array
    residual: mx.array | None = None
    shares: dict[str, float] = field(default_factory=dict)
    answers: dict[str, mx.array] = field(default_factory=dict)
    clusters: mx.array | None = None

    @classmethod
    def empty(
        cls, width: int, *, experts: int | None, with_cross: bool
    ) -> "InputStatistics":
        shape = (width, width) if experts is None else (experts, width, width)
        cross = mx.zeros(shape) if with_cross else None
        return cls(mx.zeros(shape), cross, mx.zeros(shape[:-2], mx.int32))

    def add(
        self,
        x: mx.array,
        y: mx.array | None = None,
        errors: mx.array | None = None,
        weights: mx.array | None = None,
    ) -> None:
        """Rows [T, K] of both models, and what they count, [T]; None = all alike.

        Args:
            errors: [T, N], what the residual stream has lost.
        """
        x = x.astype(mx.float32)
        left = (x if weights is None else x * weights[:, None]).T
        # One sum after the other: only one product is in memory at a time.
        self.squares = self.squares + left @ x
        self.counts = self.counts + len(x)
        mx.eval(self.squares, self.counts)
        if y is not None:
            self.cross = self.cross + left @ (y.astype(mx.float32) - x)
            mx.eval(self.cross)
        if errors is not None:
            lost = (left @ errors.astype(mx.float32)).T
            self.residual = lost if self.residual is None else self.residual + lost
            mx.eval(self.residual)

    def add_routed(
        self, x: mx.array, experts: mx.array, seen: mx.array | None = None
    ) -> None:
        """Rows [T, K], and the expert each went to, int [T].

        Args:
            seen: bool [T], or of fewer tokens that have several rows each; False = left
                out; None = all are in.
        """
        if seen is not None and not seen.all().item():
            seen = mx.repeat(seen, len(x) // len(seen))
            # As of an expert more, so that no shape depends on a value.
            experts = mx.where(seen, experts, len(self.squares))
        order = mx.argsort(experts)
        x, sorted_experts = x.astype(mx.float32)[order], experts[order]
        bounds = mx.arange(len(self.squares) + 1)[:, None]
        ends = (sorted_experts[None] < bounds).sum(axis=1).tolist()
        parts = []
        for start, end in pairwise(ends):
            rows = x[start:end]
            parts.append(rows.T @ rows)
        self.squares = self.squares + mx.stack(parts)
        self.counts = self.counts + mx.array(ends[1:]) - mx.array(ends[:-1])
        mx.eval(self.squares, self.counts)
