"""How the loss answers to what comes out of every layer, block by block.

The loss is that of tokens drawn from the model's own predictions, so the second moments
of its slopes are the Fisher information: what an error costs in nats. Hidden states go
forward and slopes back with the weights of one block in memory at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, count
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ...models.blockwise import BlockwiseModel
from ...models.hooks import GradientTap, hook_calls, path_of
from ...run.fs import require_space
from . import activation_cache
from .input_statistics import sampled_label_loss

# Positions whose logits exist at once.
LOGITS_AT_ONCE = 128
# Tokens that go back through a block at once, in whole windows.
BACK_AT_ONCE = 512
# Hidden states that no way back is taken from are kept in front of one block alone.
PASSING = "passing"


@dataclass
class OutputGradients:
    """How a loss answers to what comes out of the layers of a block.

    Attributes:
        information: by path its second moments, the Fisher information, float32 [N, N],
            mean over the tokens that count, where it was asked for.
        squares: by path its squared length for every token, float32 [T], in windows.
    """

    information: dict[str, mx.array] = field(default_factory=dict)
    squares: dict[str, list[mx.array]] = field(default_factory=dict)

    def add(self, path: str, rows: mx.array, tokens: int) -> None:
        """What some windows add: slopes [B, L, N].

        Args:
            tokens: how many the information is a mean over; 0 = it is not asked for.
        """
        rows = rows.reshape(-1, rows.shape[-1]).astype(mx.float32)
        if tokens:
            known = self.information.get(path, 0.0)
            self.information[path] = known + rows.T @ rows / tokens
        self.squares.setdefault(path, []).append(mx.square(rows).sum(axis=1))


@dataclass
class ForwardBackwardPass:
    """The way of tokens through a model and, of some parts, of slopes back.

    Attributes:
        parts: tokens, int32 [B, L] each.
        counted: bool [B, L] each, where what is predicted counts.
        back: how many parts, the first ones, go back.
        compute: the type to run blocks in.
        folder: for hidden states and slopes.
    """

    blockwise: BlockwiseModel
    parts: list[mx.array]
    counted: list[mx.array]
    back: int
    compute: mx.Dtype
    folder: Path

    def forward(self, *, besides: int = 0) -> None:
        """Every part to the end of the last block.

        Args:
            besides: bytes on disk that will be wanted later.

        Raises:
            UserError: the disk has no room for the hidden states.
        """
        for part, tokens in enumerate(self.parts):
            hidden = self.blockwise.first(tokens)
            if part == 0:
                sizes = [part.size for part in self.parts]
                kept = sum(sizes) + sum(sizes[: self.back]) * len(self.blockwise)
                states = kept * hidden.shape[-1] * 4
                require_space(self.folder, states + besides)
            self._save(0, part, hidden)
        for number in range(len(self.blockwise)):
            with self.blockwise.at_hand(number, self.compute):
                for part, tokens in enumerate(self.parts):
                    hidden = self.hidden(number, part)
                    hidden = self.blockwise.run(number, tokens, hidden)
                    self._save(number + 1, part, hidden)

    def turn(self) -> None:
        """Begin the way back: slopes by what comes out of the last block."""
        keys = map(mx.random.key, count())

        def loss(hidden, tokens, counted, key):
            logits = self.blockwise.last(tokens, hidden)
            return sampled_label_loss(logits, key, counted)

        for part, tokens in enumerate(self.parts[: self.back]):
            hidden, counted = self.hidden(len(self.blockwise), part), self.counted[part]
            rows = mx.zeros_like(hidden)
            for here in pieces(tokens):
                given = hidden[here], tokens[here], counted[here]
                rows[here] = mx.grad(loss)(*given, next(keys))
                mx.eval(rows)
            self._save("slopes", part, rows)

    def backward(
        self, inside: list[dict[str, bool]]
    ) -> Iterator[tuple[int, OutputGradients]]:
        """From the end to the front of the first block, some windows at a time.

        Args:
            inside: paths of linear layers in every block, and whether the information
                is asked of what comes out of them.

        Yields:
            A block's number, and the slopes by what comes out of its layers.
        """
        tokens_back = self.tokens_back
        for number in reversed(range(len(self.blockwise))):
            found = OutputGradients()
            with self.blockwise.at_hand(number, self.compute):
                for part, tokens in enumerate(self.parts[: self.back]):
                    hidden, slopes = self.hidden(number, part), self.slopes(part)
                    before, paths = [], inside[number]
                    at_once = max(1, BACK_AT_ONCE // tokens.shape[1])
                    for row in range(0, len(tokens), at_once):
                        here = slice(row, row + at_once)
                        given = tokens[here], hidden[here], slopes[here]
                        slope, own = self._through(number, list(paths), *given)
                        for call, rows in own.items():
                            path = path_of(call)
                            found.add(path, rows, tokens_back * paths[path])
                        mx.eval(slope, vars(found))
                        before.append(slope)
                    self._save("slopes", part, mx.concatenate(before))
            yield number, found

    @property
    def tokens_back(self) -> int:
        """How many tokens that count go back."""
        return sum(part.sum().item() for part in self.counted[: self.back])

    @property
    def tokens_counted(self) -> int:
        """How many tokens count."""
        return sum(part.sum().item() for part in self.counted)

    def hidden(self, number: int, part: int) -> mx.array:
        """Hidden states [B, L, width] in front of a block, unread."""
        return activation_cache.load(self.folder, self._stream(number, part), part)["x"]

    def slopes(self, part: int) -> mx.array:
        """The loss's derivatives [B, L, width] where the way back is now, unread."""
        return activation_cache.load(self.folder, "slopes", part)["x"]

    def _through(
        self, number: int, paths: list[str], tokens: mx.array, hidden, slopes
    ) -> tuple[mx.array, dict[str, mx.array]]:
        """Slopes in front of a block, and by call at what comes out of its layers."""
        block: nn.Module = self.blockwise.blocks[number]
        first = GradientTap()
        with hook_calls(block, paths, first):
            self.blockwise.run(number, tokens, hidden)
        calls = list(first.outputs)

        def run(hidden, *shifts):
            with hook_calls(
                block, paths, GradientTap(dict(zip(calls, shifts, strict=True)))
            ):
                return self.blockwise.run(number, tokens, hidden)

        shifts = [mx.zeros_like(first.outputs[call]) for call in calls]
        _, (before, *own) = mx.vjp(run, [hidden, *shifts], [slopes])
        return before, dict(zip(calls, own, strict=True))

    def _save(self, place: int | str, part: int, value: mx.array) -> None:
        mx.eval(value)
        activation_cache.save(
            self.folder, self._stream(place, part), part, {"x": value}
        )

    def _stream(self, place: int | str, part: int) -> str:
        return str(place) if part < self.back else PASSING


def pieces(tokens: mx.array) -> Iterator[tuple[slice, slice]]:
    """Parts of tokens [B, L] that are short enough for their logits."""
    for row in range(len(tokens)):
        for start in range(0, tokens.shape[1], LOGITS_AT_ONCE):
            yield slice(row, row + 1), slice(start, start + LOGITS_AT_ONCE)


# --- from quant.token_weights: How much every token counts in what a layer is fitted to.
#
# An error E in a layer's weights moves the loss of a token by g'Ex, with g the slope of
# the loss by what comes out of the layer; so its input x counts by the square of g's
# length (GuidedQuant, arXiv 2505.07004, of all outputs together). In a text all tokens
# matter about alike; where a question is asked and only the answer counts, they do not:
# after training on chats, at 4 bits, KL on answers was 16% less than with one weight for
# answers and one for questions, and 23% less than with all tokens alike.


# The slopes are those of one drawn token: so much of a weight is a token's own, the
# rest the mean of all tokens that count, or of all that do not.
OWN = 0.5


def seen_of(counted: mx.array) -> mx.array:
    """Bool [B, L], True up to the last position of a window that counts."""
    return mx.cummax(counted.astype(mx.int32), axis=1, reverse=True) > 0


def token_weights(
    squares: mx.array | None, counted: list[mx.array]
) -> list[mx.array] | None:
    """Weights of tokens, of those that are seen 1 on average.

    Args:
        squares: float32 [T], the squared lengths of the first tokens' slopes; None =
            all that are seen count alike.
        counted: bool [B, L] in parts, of all tokens.

    Returns:
        float32 [B * L] for every part; None = every token counts alike.
    """
    if all(part.all().item() for part in counted):
        return None
    counts = mx.concatenate([part.reshape(-1) for part in counted])
    seen = mx.concatenate([seen_of(part).reshape(-1) for part in counted])
    weights = seen.astype(mx.float32)
    if squares is not None:
        means = mx.zeros(counts.shape)
        for kind in (counts, seen & ~counts):
            known = kind[: len(squares)]
            mean = mx.where(known, squares, 0.0).sum() / mx.maximum(known.sum(), 1)
            means = mx.where(kind, mean, means)
        weights = means.at[: len(squares)].multiply(1 - OWN)
        weights = weights.at[: len(squares)].add(OWN * squares)
        weights = weights * (seen.sum() / weights.sum())
    parts = mx.split(weights, [*accumulate(part.size for part in counted)][:-1])
    mx.eval(parts)
    return parts
