"""The divergence that quantizing a layer costs, predicted for every candidate grid.

An error in a layer's weights moves its output for a token by d. The divergence from the
model grows by half the square of g'd, where g is the gradient of the loss of a token
sampled from the model's predictions (the Fisher information, per token).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ...config.quant_spec import QuantSpec
from ...files.atomic import require_space
from ...interfaces import SINGLE_PROCESS, Communicator, Logger
from ...models.hooks import GradientTap, differentiable, hook_calls, is_hidden, path_of
from ..affine_grid import AffineGrid
from ..float_grid import FloatGrid, fit_float_groups
from ..ptq.fisher import sampled_label_loss
from ..ptq.gptq.solver import fit_groups

# Weights quantized at once.
CHUNK_WEIGHTS = 1 << 24
# Dampening: a column's cost is at least this fraction of the mean.
DAMPENING_FRAC = 0.01


@dataclass(frozen=True)
class CalibrationStats:
    """Inputs and output gradients of layers on calibration sequences, on disk.

    A call is a layer's path and the number of its earlier calls in the forward pass.

    Attributes:
        folder: one file per sequence, with `inputs.*` and `experts.*` by source, and
            `gradients.*`, the loss's gradients by the outputs, by call.
        sources: by call, the first call with the same input.
        num_sequences: files.
        num_tokens: tokens in all sequences.
    """

    folder: Path
    sources: dict[str, str]
    num_sequences: int
    num_tokens: int

    def groups(self) -> list[list[str]]:
        """Paths of layers that share their first input, in the order of the calls."""
        groups: dict[str, list[str]] = {}
        seen: set[str] = set()
        for call, source in self.sources.items():
            if path_of(call) not in seen:
                groups.setdefault(source, []).append(path_of(call))
                seen.add(path_of(call))
        return list(groups.values())

    def calls(self, path: str) -> list[str]:
        """The calls of one layer."""
        return [call for call in self.sources if path_of(call) == path]

    def sequences(self) -> Iterator[dict[str, mx.array]]:
        """The tensors of every sequence, unread, by name."""
        for number in range(self.num_sequences):
            yield mx.load(_file(self.folder, number))


def collect_stats(
    model: nn.Module,
    paths: list[str],
    tokens: mx.array,
    folder: Path,
    *,
    logger: Logger | None = None,
    ranks: Communicator = SINGLE_PROCESS,
) -> CalibrationStats:
    """Run sequences [n, L] one by one and write what the layers at `paths` compute.

    Args:
        folder: that all processes see.
        logger: shows the progress. None = none is shown.
        ranks: the processes that divide the sequences.

    Raises:
        UserError: the disk has too little space.
    """
    logger, sources = logger or Logger(), {}
    own = list(ranks.shard(range(len(tokens))))
    with logger.progress(len(own), "gradients of sequences") as progress:
        for number in progress.track(own):
            key, sequence = mx.random.key(number), tokens[number]
            sources, tensors = _run_sequence(model, paths, sequence[None], key)
            if number == 0:
                size = sum(value.nbytes for value in tensors.values())
                require_space(folder, size * len(tokens))
            mx.save_safetensors(_file(folder, number), tensors)
    sources = ranks.broadcast_object(sources)
    return CalibrationStats(folder, sources, len(tokens), tokens.size)


def _file(folder: Path, number: int) -> str:
    return str(folder / f"sequence-{number:04d}.safetensors")


def _run_sequence(model: nn.Module, paths: list[str], tokens: mx.array, key: mx.array):
    """Sources by call, and the tensors of one file by name."""
    forward = GradientTap()
    with hook_calls(model, paths, forward):
        model(tokens)

    def loss(shifts):
        tap = GradientTap(shifts)
        with hook_calls(model, paths, tap):
            logits = model(tokens)
        return sampled_label_loss(logits, key), tap.inputs, tap.experts

    zeros = {call: mx.zeros_like(y) for call, y in forward.outputs.items()}
    with differentiable(model):
        (_, inputs, experts), gradients = mx.value_and_grad(loss)(zeros)
    tensors = {f"gradients.{call}": _flatten(g) for call, g in gradients.items()}
    for call in set(forward.sources.values()):
        tensors |= _input_tensors(call, inputs[call], experts.get(call))
    return forward.sources, tensors


def _input_tensors(
    call: str, x: mx.array, experts: mx.array | None
) -> dict[str, mx.array]:
    if not is_hidden(x):
        return {f"inputs.{call}": x.reshape(-1)}
    if experts is None:
        return {f"inputs.{call}": _flatten(x)}
    # [..., 1, K] for each expert, or for all of them together.
    x = mx.broadcast_to(x.squeeze(-2), (*experts.shape, x.shape[-1]))
    return {f"inputs.{call}": _flatten(x), f"experts.{call}": experts.reshape(-1)}


def _flatten(x: mx.array) -> mx.array:
    return x.reshape(-1, x.shape[-1])


@dataclass(frozen=True)
class LayerStatistics:
    """A layer's weight and the cost of an error in its columns.

    Attributes:
        weight: [..., N, K], in the type the checkpoint stores.
        costs: float32 [K], from `input_energies`.
    """

    weight: mx.array
    costs: mx.array

    def fake_quantize(self, spec: QuantSpec) -> mx.array:
        """The weight on grids fitted group by group, in its own type."""
        flat = self.weight.reshape(-1, self.weight.shape[-1])
        rows = max(1, CHUNK_WEIGHTS // flat.shape[-1])
        dtype = flat.dtype
        chunks = []
        for start in range(0, len(flat), rows):
            chunk = flat[start : start + rows].astype(mx.float32)
            grid = self._fit(chunk, spec)
            chunks.append(grid.weight(dtype).astype(dtype))
            mx.eval(chunks[-1])
        return mx.concatenate(chunks).reshape(self.weight.shape)

    def _fit(self, rows: mx.array, spec: QuantSpec) -> AffineGrid | FloatGrid:
        if spec.mode != "affine":
            return fit_float_groups(rows, self.costs, spec)
        levels, dtype = 2.0**spec.bits, self.weight.dtype
        return fit_groups(rows, self.costs, spec.group_size, levels, dtype)


def input_energies(path: str, width: int, stats: CalibrationStats) -> mx.array:
    """Dampened mean squares of a layer's inputs by column; one for embeddings."""
    total, count = mx.zeros(width), 0
    sources = {stats.sources[call] for call in stats.calls(path)}
    for tensors in stats.sequences():
        for source in sources:
            x = tensors[f"inputs.{source}"]
            if mx.issubdtype(x.dtype, mx.floating):
                total = total + (x.astype(mx.float32) ** 2).sum(axis=0)
                count += len(x)
                mx.eval(total)
    costs = total / max(1, count)
    mean = costs.mean().item()
    return costs + (DAMPENING_FRAC * mean if mean else 1.0)


def sensitivity(
    path: str, layer: LayerStatistics, options: list[QuantSpec], stats: CalibrationStats
) -> list[float]:
    """Predicted divergence, nats per token, for every candidate grid of one layer."""
    divergences = []
    for spec in options:
        error = (layer.fake_quantize(spec) - layer.weight).astype(mx.float32)
        total = mx.array(0.0)
        for tensors in stats.sequences():
            for call in stats.calls(path):
                source = stats.sources[call]
                total = total + _squared_changes(tensors, call, source, error)
            mx.eval(total)
        divergences.append(total.item() / 2 / stats.num_tokens)
    return divergences


def _squared_changes(
    tensors: dict, call: str, source: str, error: mx.array
) -> mx.array:
    """The sum of (g'd)^2 over the tokens of a call."""
    x = tensors[f"inputs.{source}"]
    gradients = tensors[f"gradients.{call}"].astype(mx.float32)
    experts = tensors.get(f"experts.{source}")
    if experts is not None:
        # Each token [K] times the error of the expert that it was routed to.
        x = x.astype(mx.float32)[:, None]
        error = error.swapaxes(-1, -2)
        moved = mx.gather_mm(x, error, rhs_indices=experts)[:, 0]
    elif mx.issubdtype(x.dtype, mx.floating):
        moved = x.astype(mx.float32) @ error.T
    else:
        moved = error[x]
    return ((moved * gradients).sum(axis=-1) ** 2).sum()
