"""Gradients of the loss with respect to layer outputs, block by block.

The labels of the loss are sampled from the model's own predictions. So the second
moments of the gradients are the Fisher information: the cost of an error in nats.
Hidden states go forward and gradients back, with one block in memory at a time. Every
process runs its own shards of the tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import mlx.core as mx

from ...files.atomic import require_space
from ...interfaces import SINGLE_PROCESS, Communicator, Progress
from ...models.blockwise import BlockwiseModel
from ...models.cross_entropy import cross_entropy_sum, exp_nonpositive
from ...models.hooks import GradientTap, hook_calls, path_of
from ..backend import added, sum_dtype
from . import activation_cache

# Positions whose logits are in memory at once.
LOGITS_AT_ONCE = 128
# Tokens that go back through a block at once, in whole windows.
BACKWARD_TOKENS = 512
GRADIENTS = "gradients"


def sampled_label_loss(
    logits: mx.array, key: mx.array, counted: mx.array | None = None
) -> mx.array:
    """Summed loss of labels sampled from the logits [..., vocabulary] themselves.

    Args:
        counted: bool [...], the positions that count. None = all.
    """
    if counted is None:
        counted = mx.ones(logits.shape[:-1], mx.bool_)
    labels = sample_labels(mx.stop_gradient(logits), key)
    return cross_entropy_sum(logits, labels, counted)


def sample_labels(logits: mx.array, key: mx.array) -> mx.array:
    """One token for each position, int [...], from the predictions [..., vocabulary].

    Inverts the cumulative distribution. On a CPU this takes a tenth of the time of
    `mx.random.categorical`, which draws a random number for every logit.
    """
    totals = mx.cumsum(unnormalized_probabilities(logits), axis=-1)
    draws = mx.random.uniform(shape=(*logits.shape[:-1], 1), key=key)
    labels = (totals <= draws * totals[..., -1:]).sum(axis=-1)
    return mx.minimum(labels, logits.shape[-1] - 1)


def unnormalized_probabilities(logits: mx.array) -> mx.array:
    """Probabilities relative to that of the most probable token, float32."""
    logits = logits.astype(mx.float32)
    return exp_nonpositive(logits - logits.max(axis=-1, keepdims=True))


def visible_positions(counted: mx.array) -> mx.array:
    """Bool [B, L], True up to the last position of a window that counts."""
    return mx.cummax(counted.astype(mx.int32), axis=1, reverse=True) > 0


def logit_chunks(tokens: mx.array) -> Iterator[tuple[slice, slice]]:
    """Parts of tokens [B, L] that are small enough for their logits."""
    for row in range(len(tokens)):
        for start in range(0, tokens.shape[1], LOGITS_AT_ONCE):
            yield slice(row, row + 1), slice(start, start + LOGITS_AT_ONCE)


@dataclass
class OutputGradients:
    """Sums over the gradients with respect to the layer outputs of a block.

    Attributes:
        fisher: by path, the Fisher information of the outputs, float32 [N, N], a mean
            over the tokens that count.
        squared_norms: by path and shard, squared gradient norm of every token, float32
            [T], by window.
        ranks: the processes that share the shards.
    """

    ranks: Communicator = SINGLE_PROCESS
    fisher: dict[str, mx.array] = field(default_factory=dict)
    squared_norms: dict[str, dict[int, list[mx.array]]] = field(default_factory=dict)

    def add_gradients(
        self, path: str, shard: int, gradients: mx.array, num_tokens: int
    ) -> None:
        """Add gradients [B, L, N] of some windows of a shard.

        Args:
            num_tokens: divisor of the Fisher information; 0 = leave it out.
        """
        rows = gradients.reshape(-1, gradients.shape[-1]).astype(mx.float32)
        if num_tokens:
            product = rows.T @ rows / num_tokens
            if path not in self.fisher:
                self.fisher[path] = mx.zeros(product.shape, sum_dtype())
            self.fisher[path] = added(self.fisher[path], product)
        norms = self.squared_norms.setdefault(path, {}).setdefault(shard, [])
        norms.append(mx.square(rows).sum(axis=1))

    def fisher_of_all(self) -> dict[str, mx.array]:
        """`fisher`, summed over all processes."""
        # Rank 0 has the first shard, so it knows all layers.
        shapes = {path: value.shape for path, value in self.fisher.items()}
        totals = {}
        for path, shape in self.ranks.broadcast_object(shapes).items():
            own = self.fisher.get(path, mx.zeros(shape, sum_dtype()))
            [total] = self.ranks.all_sum([own])
            totals[path] = total.astype(mx.float32)
            mx.eval(totals[path])
        return totals

    def norms_of_all(self) -> dict[str, mx.array]:
        """Squared gradient norms of the tokens of all processes by path, float32 [T],
        in the order of the shards."""
        own = {
            f"{shard:08d} {path}": mx.concatenate(norms)
            for path, by_shard in self.squared_norms.items()
            for shard, norms in by_shard.items()
        }
        by_path: dict[str, list[mx.array]] = {}
        for name, norms in sorted(self.ranks.exchange(own).items()):
            by_path.setdefault(name.partition(" ")[2], []).append(norms)
        return {path: mx.concatenate(norms) for path, norms in by_path.items()}


@dataclass
class ForwardBackwardPass:
    """Runs tokens forward through a model and gradients of their loss back.

    Attributes:
        tokens: int32 [B, L] by shard.
        counted: bool [B, L] by shard, the positions whose prediction counts.
        compute: dtype to run blocks in.
        folder: for hidden states and gradients.
        progress: of shards and blocks; backward counts twice.
        ranks: the processes that share the shards.
    """

    blockwise: BlockwiseModel
    tokens: list[mx.array]
    counted: list[mx.array]
    compute: mx.Dtype
    folder: Path
    progress: Progress
    ranks: Communicator = SINGLE_PROCESS

    @property
    def own_shards(self) -> list[int]:
        """Numbers of this process's shards."""
        return list(self.ranks.shard(range(len(self.tokens))))

    def forward(self, *, reserved_bytes: int = 0) -> None:
        """Run this process's shards to the end of the last block.

        Args:
            reserved_bytes: disk space that the caller needs later.

        Raises:
            UserError: the disk has no space for the hidden states.
        """
        for shard in self.own_shards:
            hidden = self.blockwise.embed(self.tokens[shard])
            if shard == 0:
                size = sum(part.size for part in self.tokens)
                states = size * (len(self.blockwise) + 1) * hidden.shape[-1] * 4
                require_space(self.folder, states + reserved_bytes)
            self._save(0, shard, hidden)
        for index in range(len(self.blockwise)):
            with self.blockwise.loaded_block(index, self.compute):
                for shard in self.own_shards:
                    tokens, hidden = self.tokens[shard], self.hidden(index, shard)
                    hidden = self.blockwise.run_block(index, tokens, hidden)
                    self._save(index + 1, shard, hidden)
                    self.progress.advance()

    def start_backward(self) -> None:
        """Compute the gradients with respect to the output of the last block."""

        def loss(hidden, tokens, counted, key):
            logits = self.blockwise.logits(tokens, hidden)
            return sampled_label_loss(logits, key, counted)

        # Every chunk has its own number, whichever process it belongs to.
        num_chunks = [len(list(logit_chunks(tokens))) for tokens in self.tokens]
        for shard in self.own_shards:
            tokens, hidden = self.tokens[shard], self.hidden(len(self.blockwise), shard)
            counted, gradients = self.counted[shard], mx.zeros_like(hidden)
            for number, chunk in enumerate(
                logit_chunks(tokens), sum(num_chunks[:shard])
            ):
                args = hidden[chunk], tokens[chunk], counted[chunk]
                gradients[chunk] = mx.grad(loss)(*args, mx.random.key(number))
                mx.eval(gradients)
            self._save(GRADIENTS, shard, gradients)

    def backward(
        self, layers: list[dict[str, bool]]
    ) -> Iterator[tuple[int, OutputGradients]]:
        """Run gradients from the last block to the input of the first.

        Args:
            layers: for every block, paths of linear layers and whether to compute the
                Fisher information of their outputs.

        Yields:
            The index of a block and the gradients of its layers on this process's
            tokens.
        """
        for index in reversed(range(len(self.blockwise))):
            sums = OutputGradients(self.ranks)
            with self.blockwise.loaded_block(index, self.compute):
                for shard in self.own_shards:
                    self._run_back(index, shard, layers[index], sums)
                    self.progress.advance(2)
            yield index, sums

    def _run_back(
        self, index: int, shard: int, layers: dict[str, bool], sums: OutputGradients
    ) -> None:
        """Run the gradients of a shard to the input of a block."""
        tokens, num_tokens = self.tokens[shard], self.num_counted_tokens
        hidden, gradients = self.hidden(index, shard), self.gradients(shard)
        before = []
        size = max(1, BACKWARD_TOKENS // tokens.shape[1])
        for row in range(0, len(tokens), size):
            rows = slice(row, row + size)
            args = tokens[rows], hidden[rows], gradients[rows]
            gradient, by_call = self._vjp(index, list(layers), *args)
            for call, output_gradients in by_call.items():
                path = path_of(call)
                sums.add_gradients(
                    path, shard, output_gradients, num_tokens * layers[path]
                )
            mx.eval(gradient, sums.fisher, sums.squared_norms)
            before.append(gradient)
        self._save(GRADIENTS, shard, mx.concatenate(before))

    @cached_property
    def num_counted_tokens(self) -> int:
        """Number of tokens that count, of all processes."""
        return sum(part.sum().item() for part in self.counted)

    def hidden(self, index: int, shard: int) -> mx.array:
        """Hidden states [B, L, width] before a block, lazy."""
        return activation_cache.load(self.folder, str(index), shard)["x"]

    def gradients(self, shard: int) -> mx.array:
        """Gradients [B, L, width] at the current place of the backward pass, lazy."""
        return activation_cache.load(self.folder, GRADIENTS, shard)["x"]

    def _vjp(
        self, index: int, paths: list[str], tokens: mx.array, hidden, gradients
    ) -> tuple[mx.array, dict[str, mx.array]]:
        """Gradients with respect to a block's input, and by call to layer outputs."""
        block = self.blockwise.blocks[index]
        tap = GradientTap()
        with hook_calls(block, paths, tap):
            self.blockwise.run_block(index, tokens, hidden)
        calls = list(tap.outputs)

        def run(hidden, *shifts):
            shifted = GradientTap(dict(zip(calls, shifts, strict=True)))
            with hook_calls(block, paths, shifted):
                return self.blockwise.run_block(index, tokens, hidden)

        shifts = [mx.zeros_like(tap.outputs[call]) for call in calls]
        _, (before, *outputs) = mx.vjp(run, [hidden, *shifts], [gradients])
        return before, dict(zip(calls, outputs, strict=True))

    def _save(self, place: int | str, shard: int, value: mx.array) -> None:
        mx.eval(value)
        activation_cache.save(self.folder, str(place), shard, {"x": value})
