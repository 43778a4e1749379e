"""AWQ scaling: move a scale per channel from a layer into the layers that it feeds.

The outputs of a norm or a linear layer are divided by the scale, and the columns of the
layers that it feeds are multiplied by it. So the block computes the same output (AWQ,
arXiv 2306.00978, section 3.2). There is no table of layer names: `find_mappings` tries
out where this holds.

The scale of a channel is a power of the mean magnitude of its inputs. The power is
searched on some tokens, and other tokens decide whether the scale is applied at all.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ...models.hooks import CapturedInputs, capture_inputs
from .base import BlockContext, BlockForward, PTQContext, Weights, set_weights

TOLERANCE = 1e-4
POWERS = tuple(step / 20 for step in range(1, 21))
# Smallest mean magnitude of a channel's inputs, relative to the largest.
MIN_MAGNITUDE = 1e-4

# Maps the path and weight of a layer to its dequantized weight.
Quantizer = Callable[[str, mx.array], mx.array]


@dataclass(frozen=True)
class ScaleMapping:
    """A place in a block for a scale.

    Attributes:
        producer: path of the layer whose outputs are divided.
        consumers: paths of all layers that it feeds, whose columns are multiplied.
        width: number of scaled channels.
        start: index of the first one among the producer's outputs.
        offset: constant that the block adds to the producer's weight.
        experts: number of experts if the producer is a mixture. Each has its own scale.
    """

    producer: str
    consumers: tuple[str, ...]
    width: int
    start: int = 0
    offset: int = 0
    experts: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the scale: [width], or [experts, width]."""
        return (self.width,) if self.experts is None else (self.experts, self.width)

    def apply(self, weights: Weights, scale: mx.array) -> Weights:
        """The parameters that change with a positive scale of `shape`."""
        name = f"{self.producer}.weight"
        names = [f"{path}.weight" for path in self.consumers]
        changed = {name: weights[name] * scale[..., None, :] for name in names}
        weight, factors = weights[name], self._output_factors(weights[name], scale)
        if weight.ndim == 1:
            changed[name] = (weight + self.offset) * factors - self.offset
        else:
            changed[name] = weight * factors[..., None]
        bias = f"{self.producer}.bias"
        if bias in weights:
            changed[bias] = weights[bias] * factors
        return changed

    def _output_factors(self, weight: mx.array, scale: mx.array) -> mx.array:
        """The factor of every output of the producer."""
        outputs = weight.shape[0] if weight.ndim == 1 else weight.shape[-2]
        after = outputs - self.start - self.width
        padding = [(0, 0)] * (scale.ndim - 1) + [(self.start, after)]
        return mx.pad(1 / scale, padding, constant_values=1)

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
        mappings: dict[tuple, ScaleMapping] = {}
        for candidate in self._candidates():
            place = candidate.producer, candidate.start, candidate.width
            mapping = None if place in mappings else self._with_consumers(candidate)
            if mapping is not None:
                mappings[place] = mapping
        return sorted(mappings.values(), key=self._call_index)

    def _candidates(self) -> Iterator[ScaleMapping]:
        for path, weight in self.producers.items():
            if weight.ndim == 1 and weight.size in self.widths:
                yield ScaleMapping(path, (), weight.size)
                yield ScaleMapping(path, (), weight.size, offset=1)
            elif weight.ndim == 2 or path in self.original.experts:
                outputs = weight.shape[-2]
                experts = len(weight) if path in self.original.experts else None
                for width in self.widths:
                    # In a fused layer, the values come last.
                    if outputs % width == 0:
                        yield ScaleMapping(
                            path, (), width, outputs - width, experts=experts
                        )

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
        # A layer may be used transposed, too.
        if {before.shape[-1], self._columns(path)} != {mapping.width}:
            return False
        if mapping.experts is not None:
            weight = self.weights[f"{path}.weight"]
            if path not in captured.experts or len(weight) != mapping.experts:
                return False
            scale = scale[captured.experts[path]]
        return _is_near(after * scale, before, mx.linalg.norm(before))

    def _columns(self, path: str) -> int:
        return self.weights[f"{path}.weight"].shape[-1]

    def _call_index(self, mapping: ScaleMapping) -> int:
        """Position of the first consumer in the order of calls."""
        return self.layers.index(mapping.consumers[0])

    def run_with(self, weights: Weights) -> tuple[mx.array, CapturedInputs]:
        set_weights(self.block, weights)
        with capture_inputs(self.block, self.layers) as captured:
            output = self.run(self.hidden)
        set_weights(self.block, self.weights)
        mx.eval(output, captured.rows)
        return output, captured

    def is_unchanged(self, output: mx.array) -> bool:
        # Relative to what the block adds: a few channels of the hidden states may be
        # much larger than all others.
        added = mx.linalg.norm(self.output - self.hidden)
        return _is_near(output, self.output, added)


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


@dataclass(frozen=True)
class BlockError:
    """The error of a block on some hidden states.

    Attributes:
        hidden: [B, L, width].
        target: output of the full-precision block.
    """

    block: nn.Module
    run: BlockForward
    hidden: mx.array
    target: mx.array

    @classmethod
    def of(cls, block: nn.Module, run: BlockForward, hidden: mx.array) -> "BlockError":
        target = run(hidden)
        mx.eval(target)
        return cls(block, run, hidden, target)

    def error(self, weights: Weights) -> float:
        """Squared error of the output, relative to what the block adds."""
        set_weights(self.block, weights)
        error = mx.square(self.run(self.hidden) - self.target).sum()
        return (error / mx.square(self.target - self.hidden).sum()).item()

    def capture_inputs(self, weights: Weights, paths: list[str]) -> CapturedInputs:
        """Inputs of layers with these weights."""
        set_weights(self.block, weights)
        with capture_inputs(self.block, paths) as captured:
            self.run(self.hidden)
        return captured


def quantized_weights(
    weights: Weights, paths: list[str], quantizer: Quantizer
) -> Weights:
    """The parameters of a block with those of some layers quantized."""
    names = {path: f"{path}.weight" for path in paths}
    return weights | {n: quantizer(path, weights[n]) for path, n in names.items()}


@dataclass(frozen=True)
class ScalingResult:
    """The result of a search for scales.

    Attributes:
        weights: all parameters of the block.
        mappings: those that were applied.
        before, after: error of the quantized block on the validation tokens without
            and with the scales.
        search: error on the tokens that choose the scales.
        validation: error on the tokens that decide whether a scale is applied.
    """

    weights: Weights
    mappings: list[ScaleMapping]
    before: float
    after: float
    search: BlockError
    validation: BlockError


def search_scales(
    mappings: list[ScaleMapping],
    weights: Weights,
    paths: list[str],
    quantizer: Quantizer,
    search: BlockError,
    validation: BlockError,
    dtypes: dict[str, mx.Dtype],
) -> ScalingResult:
    """Apply the scales that reduce the error of the quantized block.

    Args:
        weights: float32 parameters of the block. The block has others afterwards.
        paths: paths of the layers that will be quantized.
        search: on tokens that choose a scale.
        validation: on tokens that decide whether it is applied, with all layers
            quantized.
        dtypes: dtypes that the parameters are stored in.
    """
    before = validation.error(quantized_weights(weights, paths, quantizer))
    best_error, applied = before, []
    for mapping in mappings:
        scale = _best_scale(mapping, weights, paths, quantizer, search)
        if scale is None:
            continue
        dtype = dtypes[f"{mapping.producer}.weight"]
        scale = mapping.round_scale(weights, scale, dtype)
        candidate = weights | mapping.apply(weights, scale)
        error = validation.error(quantized_weights(candidate, paths, quantizer))
        if error < best_error:
            weights, best_error = candidate, error
            applied.append(mapping)
    return ScalingResult(weights, applied, before, best_error, search, validation)


def _best_scale(
    mapping: ScaleMapping,
    weights: Weights,
    paths: list[str],
    quantizer: Quantizer,
    search: BlockError,
) -> mx.array | None:
    """The scale with the least error of the quantized consumers. None = no scale."""
    consumers = [path for path in mapping.consumers if path in paths]
    captured = search.capture_inputs(weights, [mapping.consumers[0]])
    magnitudes = _input_magnitudes(mapping, captured)
    best_error, best = (
        search.error(quantized_weights(weights, consumers, quantizer)),
        None,
    )
    for power in POWERS:
        scale = scale_of(magnitudes, power)
        candidate = weights | mapping.apply(weights, scale)
        error = search.error(quantized_weights(candidate, consumers, quantizer))
        if error < best_error:
            best_error, best = error, scale
    return best


def _input_magnitudes(mapping: ScaleMapping, captured: CapturedInputs) -> mx.array:
    """Mean magnitude of the inputs by channel, in the shape of the scale."""
    path = mapping.consumers[0]
    rows = mx.abs(captured.rows[path])
    if mapping.experts is None:
        return rows.mean(axis=0)
    experts = captured.experts[path]
    sums = mx.zeros(mapping.shape).at[experts].add(rows)
    counts = mx.zeros((mapping.experts, 1)).at[experts].add(mx.array(1.0))
    return sums / mx.maximum(counts, 1)


def scale_of(magnitudes: mx.array, power: float) -> mx.array:
    """Magnitudes to a power, normalized around 1; all 1 if there were no inputs."""
    largest = magnitudes.max(axis=-1, keepdims=True)
    floor = MIN_MAGNITUDE * largest
    magnitudes = mx.where(largest == 0, 1, mx.maximum(magnitudes, floor))
    scale = magnitudes**power
    ends = scale.max(axis=-1, keepdims=True) * scale.min(axis=-1, keepdims=True)
    return scale / mx.sqrt(ends)


class AWQScaler:
    """Finds the mappings of each block, searches scales, and logs the result."""

    def __init__(self, context: PTQContext):
        self.context = context
        self.num_blocks = self.num_mappings = self.num_applied = 0
        # By the names and shapes of a block's parameters.
        self._known: dict[tuple, list[ScaleMapping]] = {}

    def scale(self, block: BlockContext) -> ScalingResult:
        """Search scales for a block and apply those that help."""
        set_weights(block.block, block.weights)
        mappings = self._mappings(block)
        search, validation = (BlockError.of(block.block, *s) for s in block.samples)
        result = search_scales(
            mappings,
            block.weights,
            block.paths,
            self.quantizer(block),
            search,
            validation,
            block.dtypes,
        )
        self._log(block, mappings, result)
        return result

    def quantizer(self, block: BlockContext) -> Quantizer:
        """Quantizes and dequantizes a layer of a block with RTN, in float32."""

        def quantize(path: str, weight: mx.array) -> mx.array:
            layer = self.context.rtn(block.prefix + path, weight)
            return layer.weight.astype(mx.float32)

        return quantize

    def log_summary(self) -> None:
        self.context.logger.info(
            f"AWQ scales applied to {self.num_applied} of {self.num_mappings} mappings "
            f"in {self.num_blocks} blocks"
        )

    def _mappings(self, block: BlockContext) -> list[ScaleMapping]:
        shapes = tuple((name, *v.shape) for name, v in block.weights.items())
        run, hidden = block.samples[0]
        sample = block.block, run, hidden[:1]
        known = self._known.get(shapes)
        if known is None or not preserves_output(known, *sample):
            known = self._known[shapes] = find_mappings(*sample)
        # A scale does not help a layer that is not quantized.
        paths = set(block.paths)
        return [mapping for mapping in known if paths.intersection(mapping.consumers)]

    def _log(
        self, block: BlockContext, mappings: list[ScaleMapping], result: ScalingResult
    ) -> None:
        self.num_blocks += 1
        self.num_mappings += len(mappings)
        self.num_applied += len(result.mappings)
        names = ", ".join(mapping.producer for mapping in result.mappings) or "none"
        self.context.logger.info(
            f"{block.prefix.rstrip('.')}: AWQ scales applied to {len(result.mappings)} "
            f"of {len(mappings)} mappings ({names}); relative output error "
            f"{result.after:.3g}, without scales {result.before:.3g}"
        )
