"""AWQ scaling: move a scale per channel from a layer into the layers that it feeds.

`scale_mappings` finds the places where the block computes the same output (AWQ, arXiv
2306.00978, section 3.2).

The scale of a channel is a power of the mean magnitude of its inputs. The power is
searched on some tokens, and other tokens decide whether the scale is applied at all.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ...models.hooks import CapturedInputs, capture_inputs
from .base import BlockContext, BlockForward, PTQContext, Weights, set_weights
from .scale_mappings import BlockMappings, ScaleMapping

POWERS = tuple(step / 20 for step in range(1, 21))
# Smallest mean magnitude of a channel's inputs, relative to the largest.
MIN_MAGNITUDE = 1e-4

# Maps the path and weight of a layer to its dequantized weight.
Quantizer = Callable[[str, mx.array], mx.array]


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
        self._block_mappings = BlockMappings()

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
        known = self._block_mappings.of(block.block, *block.samples[0])
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
