"""TODO."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ...models.hooks import GradientTap, differentiable, hook_calls, is_hidden, path_of
from ...run.fs import require_space
from ..ptq.input_statistics import sampled_label_loss


@dataclass(frozen=True)
class CalibrationStats:
    """What `collect` has written.

    Attributes:
        folder: a file for every window, with inputs.* and experts.* by source, and
            slopes.*, the loss's derivatives by the outputs, by call.
        sources: by call, the first one with the very same input.
        tokens: how many the model was watched on.
    """

    folder: Path
    sources: dict[str, str]
    tokens: int

    def groups(self) -> list[list[str]]:
        """Paths of layers that share their first input, in the order of the calls."""
        found: dict[str, list[str]] = {}
        placed: set[str] = set()
        for call, source in self.sources.items():
            if path_of(call) not in placed:
                found.setdefault(source, []).append(path_of(call))
                placed.add(path_of(call))
        return list(found.values())

    def calls(self, path: str) -> list[str]:
        """The calls of one layer."""
        return [call for call in self.sources if path_of(call) == path]

    def parts(self) -> Iterator[dict[str, mx.array]]:
        """What was written, lazy, by window."""
        for file in sorted(self.folder.glob("part-*")):
            yield mx.load(str(file))


def collect_stats(
    model: nn.Module, paths: list[str], tokens: mx.array, folder: Path, *, seed: int
) -> CalibrationStats:
    """Watch the layers at `paths` on windows [n, L], one by one.

    Raises:
        UserError: the disk has no room for it.
    """
    for number, window in enumerate(tokens):
        key = mx.random.key(seed + number)
        sources, found = _watch(model, paths, window[None], key)
        if number == 0:
            size = sum(value.nbytes for value in found.values())
            require_space(folder, size * len(tokens))
        mx.save_safetensors(str(folder / f"part-{number:04d}.safetensors"), found)
    return CalibrationStats(folder, sources, tokens.size)


def _watch(model: nn.Module, paths: list[str], tokens: mx.array, key: mx.array):
    """Sources by call, and by name what a file has of one window."""
    first = GradientTap()
    with hook_calls(model, paths, first):
        model(tokens)

    def loss(shifts):
        tap = GradientTap(shifts)
        with hook_calls(model, paths, tap):
            logits = model(tokens)
        return sampled_label_loss(logits, key), tap.inputs, tap.experts

    zeros = {call: mx.zeros_like(y) for call, y in first.outputs.items()}
    with differentiable(model):
        (_, inputs, experts), slopes = mx.value_and_grad(loss)(zeros)
    found = {f"slopes.{call}": _rows(slope) for call, slope in slopes.items()}
    for call in set(first.sources.values()):
        found |= _inputs(call, inputs[call], experts.get(call))
    return first.sources, found


def _inputs(call: str, x: mx.array, experts: mx.array | None) -> dict[str, mx.array]:
    if not is_hidden(x):
        return {f"inputs.{call}": x.reshape(-1)}
    if experts is None:
        return {f"inputs.{call}": _rows(x)}
    # [..., 1, K] for each of the experts, or for all of them alike.
    x = mx.broadcast_to(x.squeeze(-2), (*experts.shape, x.shape[-1]))
    return {f"inputs.{call}": _rows(x), f"experts.{call}": experts.reshape(-1)}


def _rows(x: mx.array) -> mx.array:
    return x.reshape(-1, x.shape[-1])
