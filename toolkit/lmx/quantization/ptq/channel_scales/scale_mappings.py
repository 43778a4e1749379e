"""Places in a block for a scale per channel, which do not change its output.

The outputs of a norm or a linear layer are divided by the scale, and the columns of the
layers that it feeds are multiplied by it. So the block computes the same output.
SmoothQuant and AWQ use such scales. There is no table of layer names: `find_mappings`
tries out where this holds.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ....models.hooks import CapturedInputs, capture_inputs
from ..base import Weights

# Maps hidden states [B, L, width] to the output of a block.
BlockForward = Callable[[mx.array], mx.array]
TOLERANCE = 1e-4


@dataclass(frozen=True)
class ScaleMapping:
    """A place in a block for a scale.

    Attributes:
        producer: path of the layer whose outputs are divided.
        consumers: paths of all layers that it feeds, whose columns are multiplied.
        width: number of scaled channels.
        start: index of the first one among the producer's outputs.
        offset: constant that the block adds to the producer's weight.
        repeats: columns that each channel feeds. Query heads that share their values
            lie side by side.
        head: channels of a head, if they are repeated.
        experts: experts of a mixture, each with its own scale. 0 = one scale.
    """

    producer: str
    consumers: tuple[str, ...]
    width: int
    start: int = 0
    offset: int = 0
    repeats: int = 1
    head: int = 1
    experts: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the scale."""
        return (self.experts, self.width) if self.experts else (self.width,)

    def columns(self, scale: mx.array) -> mx.array:
        """The scales [..., K] of the consumers' columns."""
        if self.repeats == 1:
            return scale
        return mx.repeat(scale.reshape(-1, self.head), self.repeats, axis=0).reshape(-1)

    def channels(self, values: mx.array) -> mx.array:
        """Means of the values of columns [..., K] over those of each channel."""
        if self.repeats == 1:
            return values
        return values.reshape(-1, self.repeats, self.head).mean(axis=1).reshape(-1)

    def divided(self, inputs: Weights, scale: mx.array) -> Weights:
        """Magnitudes of the consumers' inputs, divided by the scale."""
        columns = self.columns(scale)
        return {path: inputs[path] / columns for path in self.consumers}

    def apply(self, weights: Weights, scale: mx.array) -> Weights:
        """The parameters that change with a positive scale of this `shape`."""
        name = f"{self.producer}.weight"
        names = [f"{path}.weight" for path in self.consumers]
        columns = self.columns(scale)
        columns = columns[:, None] if self.experts else columns
        changed = {name: weights[name] * columns for name in names}
        weight = weights[name]
        outputs = weight.shape[0] if weight.ndim == 1 else weight.shape[-2]
        after = outputs - self.start - self.width
        padding = [(0, 0)] * (scale.ndim - 1) + [(self.start, after)]
        factors = mx.pad(1 / scale, padding, constant_values=1)
        if weight.ndim == 1:
            changed[name] = (weight + self.offset) * factors - self.offset
        else:
            changed[name] = weight * factors[..., None]
        bias = f"{self.producer}.bias"
        if bias in weights:
            changed[bias] = weights[bias] * factors
        return changed

    def round_scale(
        self, weights: Weights, scale: mx.array, dtype: mx.Dtype
    ) -> mx.array:
        """The nearest scale that a norm's weights represent exactly in `dtype`."""
        weight = weights[f"{self.producer}.weight"]
        if weight.ndim > 1:
            return scale
        stored = ((weight + self.offset) / scale - self.offset).astype(dtype)
        stored = stored.astype(mx.float32) + self.offset
        rounded = (weight + self.offset) / mx.where(stored == 0, 1, stored)
        return mx.where((stored == 0) | (rounded <= 0), scale, rounded)


def find_mappings(
    block: nn.Module, run: BlockForward, hidden: mx.array
) -> list[ScaleMapping]:
    """Find all mappings of a block by applying a random scale.

    Args:
        block: its parameters are float32. They are the same afterwards.
        hidden: float32 [B, L, width], of a few tokens.
    """
    return _MappingFinder(block, run, hidden).find()


def preserves_output(
    mappings: list[ScaleMapping], block: nn.Module, run: BlockForward, hidden: mx.array
) -> bool:
    """Whether the output of this block stays the same under the mappings."""
    finder = _MappingFinder(block, run, hidden)
    weights = finder.weights
    for mapping in mappings:
        weights = weights | mapping.apply(weights, _probe_scale(mapping))
    return finder.is_unchanged(finder.run_with(weights)[0])


class _MappingFinder:
    def __init__(self, block: nn.Module, run: BlockForward, hidden: mx.array):
        self.block, self.run, self.hidden = block, run, hidden
        self.weights = dict(tree_flatten(block.parameters()))
        self.producers = {
            path: module.weight
            for path, module in block.named_modules()
            if "weight" in module
            and (module.weight.ndim == 1 or hasattr(module, "to_quantized"))
        }
        self.layers = [
            path for path, module in block.named_modules() if _multiplies(module)
        ]
        self.output, self.original = self.run_with(self.weights)
        # In the order of their calls.
        called = list(self.original.rows)
        # Layers that these tokens do not call may be fed too: exclude their widths.
        uncalled = {self._columns(path) for path in self.layers if path not in called}
        self.layers = called
        self.widths = {self._columns(path) for path in called} - uncalled

    def find(self) -> list[ScaleMapping]:
        candidates: list[ScaleMapping] = []
        for path, weight in self.producers.items():
            if weight.ndim == 1 and weight.size in self.widths:
                candidates.append(ScaleMapping(path, (), weight.size))
                candidates.append(ScaleMapping(path, (), weight.size, offset=1))
            elif weight.ndim == 2:
                candidates += _of_linear_layer(path, len(weight), self.widths)
            elif weight.ndim == 3 and (width := weight.shape[1]) in self.widths:
                candidates.append(ScaleMapping(path, (), width, experts=len(weight)))
        mappings: dict[tuple, ScaleMapping] = {}
        for candidate in candidates:
            place = candidate.producer, candidate.start, candidate.width
            mapping = None if place in mappings else self._with_consumers(candidate)
            if mapping is not None:
                mappings[place] = mapping
        # In the order of the calls of the first consumers.
        calls = {path: number for number, path in enumerate(self.layers)}
        return sorted(mappings.values(), key=lambda m: calls[m.consumers[0]])

    def _with_consumers(self, mapping: ScaleMapping) -> ScaleMapping | None:
        """The mapping with all its consumers. None if it changes the output."""
        scale = _probe_scale(mapping)
        while True:
            changed = self.weights | mapping.apply(self.weights, scale)
            output, captured = self.run_with(changed)
            # Experts are called in the same order only once their router is scaled.
            more = [
                path
                for path in self.layers
                if path not in mapping.consumers
                and self._is_fed(path, mapping, scale, captured)
            ]
            if not more:
                break
            mapping = replace(mapping, consumers=(*mapping.consumers, *more))
        return mapping if mapping.consumers and self.is_unchanged(output) else None

    def _is_fed(
        self,
        path: str,
        mapping: ScaleMapping,
        scale: mx.array,
        captured: CapturedInputs,
    ) -> bool:
        """Whether the input of a layer is divided by the scale."""
        before, after = self.original.rows.get(path), captured.rows.get(path)
        if before is None or after is None or before.shape != after.shape:
            return False
        columns = mapping.columns(scale)
        if mapping.experts:
            if path not in captured.experts:
                return False
            columns = columns[captured.experts[path]]
        # A layer may be used transposed, too.
        if {before.shape[-1], self._columns(path)} != {columns.shape[-1]}:
            return False
        return _is_near(after * columns, before, mx.linalg.norm(before))

    def _columns(self, path: str) -> int:
        return self.weights[f"{path}.weight"].shape[-1]

    def run_with(self, weights: Weights) -> tuple[mx.array, CapturedInputs]:
        self.block.update(tree_unflatten(list(weights.items())))
        with capture_inputs(self.block, self.layers) as captured:
            output = self.run(self.hidden)
        self.block.update(tree_unflatten(list(self.weights.items())))
        mx.eval(output, captured.rows)
        return output, captured

    def is_unchanged(self, output: mx.array) -> bool:
        # Relative to what the block adds: a few channels of the hidden states may be
        # much larger than all others.
        added = mx.linalg.norm(self.output - self.hidden)
        return _is_near(output, self.output, added)


def _of_linear_layer(path: str, outputs: int, widths: set[int]) -> list[ScaleMapping]:
    """Candidates for a layer that feeds a layer of one of these widths."""
    candidates = []
    for width in widths:
        # In a fused layer, the values come last.
        if outputs % width == 0:
            candidates.append(ScaleMapping(path, (), width, outputs - width))
        # Values that heads share: alone, or behind all queries and as many keys.
        for channels in (outputs, (outputs - width) // 2):
            if 0 < channels < width and width % channels == 0:
                shared = ScaleMapping(path, (), channels, outputs - channels)
                candidates += [
                    replace(shared, repeats=width // channels, head=head)
                    for head in range(channels, 0, -1)
                    if channels % head == 0
                ]
    return candidates


def _multiplies(module: nn.Module) -> bool:
    """Whether a module multiplies its input by a weight, as layers and routers do."""
    is_leaf = "weight" in module and not module.children()
    if not is_leaf or isinstance(module, nn.Embedding):
        return False
    return hasattr(module, "to_quantized") or module.weight.ndim == 2


def _is_near(value: mx.array, other: mx.array, norm: mx.array) -> bool:
    error = mx.linalg.norm(value - other)
    return bool(((norm > 0) & (error <= TOLERANCE * norm)).item())


def _probe_scale(mapping: ScaleMapping) -> mx.array:
    """Powers of two other than 1, which every floating-point dtype represents."""
    key = mx.random.key(mapping.width)
    indices = mx.random.randint(0, 4, mapping.shape, key=key)
    return mx.array([0.25, 0.5, 2.0, 4.0])[indices]
