"""Where a block lets a scale per channel pass from one layer into those that follow.

A norm, or a linear layer, has its outputs divided by the scale and the layers it feeds
have their columns multiplied, so the block computes what it did (arXiv 2306.00978,
section 3.2). No table of names says where that holds: it is tried.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ...models.hooks import CapturedInputs, capture_inputs
from ..packing import expand, pack
from .base import PTQContext
from .block_context import BlockContext, BlockForward, Weights, set_weights

TOLERANCE = 1e-4

# A block's parameters by name inside it.


@dataclass(frozen=True)
class ScaleMapping:
    """A place for a scale.

    Attributes:
        producer: path in the block of the layer whose outputs are divided.
        consumers: paths of all that is fed by it, whose columns are multiplied.
        width: how many channels are scaled.
        start: the first of them among the producer's outputs.
        offset: what the block adds to the producer's weight before it is used.
        experts: how many the producer is a mixture of; each has its own scale.
    """

    producer: str
    consumers: tuple[str, ...]
    width: int
    start: int = 0
    offset: int = 0
    experts: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the scale: [width], or [experts, width]."""
        return (self.width,) if self.experts is None else (self.experts, self.width)

    def moved(self, weights: Weights, scale: mx.array) -> Weights:
        """The parameters that change, with a positive scale of `shape` folded in."""
        name = f"{self.producer}.weight"
        found = {f"{path}.weight": weights[f"{path}.weight"] for path in self.consumers}
        found = {path: value * scale[..., None, :] for path, value in found.items()}
        weight, share = weights[name], self._shares(weights[name], scale)
        if weight.ndim == 1:
            found[name] = (weight + self.offset) * share - self.offset
        else:
            found[name] = weight * share[..., None]
        bias = f"{self.producer}.bias"
        return found | ({bias: weights[bias] * share} if bias in weights else {})

    def _shares(self, weight: mx.array, scale: mx.array) -> mx.array:
        """What every output of the producer is multiplied by."""
        outputs = weight.shape[0] if weight.ndim == 1 else weight.shape[-2]
        after = outputs - self.start - self.width
        padding = [(0, 0)] * (scale.ndim - 1) + [(self.start, after)]
        return mx.pad(1 / scale, padding, constant_values=1)

    def storable(self, weights: Weights, scale: mx.array, dtype: mx.Dtype) -> mx.array:
        """The scale next to `scale` that a norm's weights in `dtype` stand for."""
        weight = weights[f"{self.producer}.weight"]
        if weight.ndim > 1:
            return scale
        stored = ((weight + self.offset) / scale - self.offset).astype(dtype)
        stored = stored.astype(mx.float32) + self.offset
        found = (weight + self.offset) / mx.where(stored == 0, 1, stored)
        return mx.where((stored == 0) | (found <= 0), scale, found)


def find_mappings(
    block: nn.Module, run: BlockForward, hidden: mx.array
) -> list[ScaleMapping]:
    """All places of a block, found by folding a random scale.

    Args:
        block: its parameters are float32; they are left as they were.
        hidden: float32 [B, L, width], a few tokens' worth.
    """
    return _MappingFinder(block, run, hidden).found()


def holds(
    folds: list[ScaleMapping], block: nn.Module, run: BlockForward, hidden: mx.array
) -> bool:
    """Whether folds leave the output of this block, too, as it was."""
    finder = _MappingFinder(block, run, hidden)
    weights = finder.weights
    for fold in folds:
        weights = weights | fold.moved(weights, _probe_scale(fold))
    return finder.is_unchanged(finder.seen_with(weights)[0])


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
        self.layers = [path for path, module in block.named_modules() if _reads(module)]
        self.output, self.before = self.seen_with(self.weights)
        # In the order of their calls.
        called = list(self.before.rows)
        # What these tokens do not call might be fed as well: their widths are left out.
        idle = {self._columns(path) for path in self.layers if path not in called}
        self.layers = called
        self.widths = {self._columns(path) for path in called} - idle

    def found(self) -> list[ScaleMapping]:
        folds: dict[tuple, ScaleMapping] = {}
        for candidate in self._candidates():
            place = candidate.producer, candidate.start, candidate.width
            fold = None if place in folds else self._completed(candidate)
            if fold is not None:
                folds[place] = fold
        return sorted(folds.values(), key=self._call)

    def _candidates(self) -> Iterator[ScaleMapping]:
        for path, weight in self.producers.items():
            if weight.ndim == 1 and weight.size in self.widths:
                yield ScaleMapping(path, (), weight.size)
                yield ScaleMapping(path, (), weight.size, offset=1)
            elif weight.ndim == 2 or path in self.before.experts:
                outputs = weight.shape[-2]
                experts = len(weight) if path in self.before.experts else None
                for width in self.widths:
                    # A layer that is several in one has the values last.
                    if outputs % width == 0:
                        yield ScaleMapping(
                            path, (), width, outputs - width, experts=experts
                        )

    def _completed(self, fold: ScaleMapping) -> ScaleMapping | None:
        """The fold with all its consumers, if there are any and the output stays."""
        scale = _probe_scale(fold)
        while True:
            changed = self.weights | fold.moved(self.weights, scale)
            output, now = self.seen_with(changed)
            # Experts are met in the same order only once their router is scaled.
            more = [
                path
                for path in self.layers
                if path not in fold.consumers and self._is_fed(path, fold, scale, now)
            ]
            if not more:
                break
            fold = replace(fold, consumers=(*fold.consumers, *more))
        return fold if fold.consumers and self.is_unchanged(output) else None

    def _is_fed(
        self, path: str, fold: ScaleMapping, scale: mx.array, now: CapturedInputs
    ) -> bool:
        """Whether a layer's input is divided by the scale."""
        before, after = (seen.rows.get(path) for seen in (self.before, now))
        if before is None or after is None or before.shape != after.shape:
            return False
        # A layer may be used transposed, too.
        if {before.shape[-1], self._columns(path)} != {fold.width}:
            return False
        if fold.experts is not None:
            weight = self.weights[f"{path}.weight"]
            if path not in now.experts or len(weight) != fold.experts:
                return False
            scale = scale[now.experts[path]]
        return _is_near(after * scale, before, mx.linalg.norm(before))

    def _columns(self, path: str) -> int:
        return self.weights[f"{path}.weight"].shape[-1]

    def _call(self, fold: ScaleMapping) -> int:
        """When what it feeds is called."""
        return self.layers.index(fold.consumers[0])

    def seen_with(self, weights: Weights) -> tuple[mx.array, CapturedInputs]:
        set_weights(self.block, weights)
        with capture_inputs(self.block, self.layers) as seen:
            output = self.run(self.hidden)
        set_weights(self.block, self.weights)
        mx.eval(output, seen.rows)
        return output, seen

    def is_unchanged(self, output: mx.array) -> bool:
        # By what the block adds: hidden states may have channels that drown all else.
        added = mx.linalg.norm(self.output - self.hidden)
        return _is_near(output, self.output, added)


def _reads(module: nn.Module) -> bool:
    """Whether a module multiplies its input by a weight [..., K]: a router may, too."""
    is_leaf = "weight" in module and not module.children()
    if not is_leaf or isinstance(module, nn.Embedding):
        return False
    return hasattr(module, "to_quantized") or module.weight.ndim == 2


def _is_near(value: mx.array, other: mx.array, size: mx.array) -> bool:
    off = mx.linalg.norm(value - other)
    return bool(((size > 0) & (off <= TOLERANCE * size)).item())


def _probe_scale(fold: ScaleMapping) -> mx.array:
    """Powers of two, which no floating-point type rounds, and none of them 1."""
    key = mx.random.key(fold.width)
    powers = mx.random.randint(0, 4, fold.shape, key=key)
    return mx.array([0.25, 0.5, 2.0, 4.0])[powers]


# --- from quant.fold_search: Scales worth folding: those that bring the rounded block nearer to what it was.
#
# AWQ (arXiv 2306.00978): a channel's scale is a power of the mean size of its inputs.
# The power is searched on some tokens, and whether the scale is folded at all is decided
# on others.


POWERS = tuple(step / 20 for step in range(1, 21))
# The least mean size of a channel's inputs, as a share of the largest.
LEAST_MEAN = 1e-4

# What the weight of a layer stands for once it is stored.
Quantizer = Callable[[str, mx.array], mx.array]


@dataclass(frozen=True)
class BlockError:
    """A block on some hidden states.

    Attributes:
        hidden: [B, L, width].
        target: what the block makes of them before anything is rounded.
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
        """Squared distance of the output from the target, as a share of it."""
        set_weights(self.block, weights)
        off = mx.square(self.run(self.hidden) - self.target).sum()
        return (off / mx.square(self.target - self.hidden).sum()).item()

    def inputs(self, weights: Weights, paths: list[str]) -> CapturedInputs:
        """What goes into layers."""
        set_weights(self.block, weights)
        with capture_inputs(self.block, paths) as seen:
            self.run(self.hidden)
        return seen


def rounded(weights: Weights, paths: list[str], rounding: Quantizer) -> Weights:
    """A block's parameters with those of layers rounded."""
    names = {path: f"{path}.weight" for path in paths}
    return weights | {n: rounding(path, weights[n]) for path, n in names.items()}


@dataclass(frozen=True)
class ScalingResult:
    """What a search came to.

    Attributes:
        weights: all parameters of the block.
        folds: those that were done.
        before: error of the rounded block on the tokens held apart, without them.
        after: and with them.
        search: the trial that chose scales.
        held: the one on the tokens held apart.
    """

    weights: Weights
    folds: list[ScaleMapping]
    before: float
    after: float
    search: BlockError
    held: BlockError


def search_scales(
    folds: list[ScaleMapping],
    weights: Weights,
    paths: list[str],
    rounding: Quantizer,
    search: BlockError,
    held: BlockError,
    dtypes: dict[str, mx.Dtype],
) -> ScalingResult:
    """Fold the scales that make a block lose less by rounding.

    Args:
        weights: float32, of the block; it has other ones afterwards.
        paths: of the layers that will be rounded.
        search: on tokens that choose a scale.
        held: on tokens that say whether it is any use; they see all layers rounded.
        dtypes: what the parameters are stored in.
    """
    before = least = held.error(rounded(weights, paths, rounding))
    done = []
    for fold in folds:
        scale = _best_scale(fold, weights, paths, rounding, search)
        if scale is None:
            continue
        scale = fold.storable(weights, scale, dtypes[f"{fold.producer}.weight"])
        tried = weights | fold.moved(weights, scale)
        error = held.error(rounded(tried, paths, rounding))
        if error < least:
            weights, least = tried, error
            done.append(fold)
    return ScalingResult(weights, done, before, least, search, held)


def _best_scale(
    fold: ScaleMapping, weights: Weights, paths, rounding, search: BlockError
):
    """The scale with which its consumers, rounded, lose least; None = none at all."""
    fed = [path for path in fold.consumers if path in paths]
    sizes = _sizes(fold, search.inputs(weights, [fold.consumers[0]]))
    least, best = search.error(rounded(weights, fed, rounding)), None
    for power in POWERS:
        scale = scale_of(sizes, power)
        tried = weights | fold.moved(weights, scale)
        error = search.error(rounded(tried, fed, rounding))
        if error < least:
            least, best = error, scale
    return best


def _sizes(fold: ScaleMapping, seen: CapturedInputs) -> mx.array:
    """Mean size of the inputs by channel, of the shape of the fold's scale."""
    path = fold.consumers[0]
    rows = mx.abs(seen.rows[path])
    if fold.experts is None:
        return rows.mean(axis=0)
    experts = seen.experts[path]
    sums = mx.zeros(fold.shape).at[experts].add(rows)
    counts = mx.zeros((fold.experts, 1)).at[experts].add(mx.array(1.0))
    return sums / mx.maximum(counts, 1)


def scale_of(sizes: mx.array, power: float) -> mx.array:
    """Sizes to a power, around 1; all 1 where nothing was seen."""
    largest = sizes.max(axis=-1, keepdims=True)
    sizes = mx.where(largest == 0, 1, mx.maximum(sizes, LEAST_MEAN * largest))
    scale = sizes**power
    ends = scale.max(axis=-1, keepdims=True) * scale.min(axis=-1, keepdims=True)
    return scale / mx.sqrt(ends)


# --- from quant.block_folds: Folding scales into the blocks of a model, one after the other.


class AWQScaler:
    """Finds the places, searches the scales, and tells what came of it."""

    def __init__(self, task: PTQContext):
        self.task = task
        self.blocks = self.places = self.done = 0
        # By the names and shapes of a block's parameters.
        self._known: dict[tuple, list[ScaleMapping]] = {}

    def __call__(self, opened: BlockContext) -> Weights:
        """The block's weights with all scales folded in that are of use."""
        return self.folded(opened).weights

    def folded(self, opened: BlockContext) -> ScalingResult:
        """The same, and how much it helps."""
        set_weights(opened.block, opened.weights)
        folds = self._folds(opened)
        search, held = (BlockError.of(opened.block, *part) for part in opened.parts)
        found = search_scales(
            folds,
            opened.weights,
            opened.paths,
            lambda path, weight: self.rounded(opened.prefix + path, weight),
            search,
            held,
            opened.dtypes,
        )
        self._tell(opened, folds, found)
        return found

    def rounded(self, path: str, weight: mx.array) -> mx.array:
        """What a layer's weight stands for once it is rounded to the nearest."""
        spec, dtype = self.task.specs[path], self.task.dtype
        return expand(pack(weight, spec, dtype), spec, dtype).astype(mx.float32)

    def sum_up(self) -> None:
        """One line for all blocks."""
        self.task.logger.info(
            f"scales folded into {self.done} of {self.places} places of "
            f"{self.blocks} blocks"
        )

    def _folds(self, opened: BlockContext) -> list[ScaleMapping]:
        shapes = tuple((name, *v.shape) for name, v in opened.weights.items())
        run, hidden = opened.parts[0]
        arguments = opened.block, run, hidden[:1]
        known = self._known.get(shapes)
        if known is None or not holds(known, *arguments):
            known = self._known[shapes] = find_mappings(*arguments)
        # What nobody rounds gains nothing by a scale.
        rounded = set(opened.paths)
        return [fold for fold in known if rounded.intersection(fold.consumers)]

    def _tell(
        self, opened: BlockContext, folds: list[ScaleMapping], found: ScalingResult
    ) -> None:
        self.blocks += 1
        self.places += len(folds)
        self.done += len(found.folds)
        where = ", ".join(fold.producer for fold in found.folds) or "nothing"
        self.task.logger.info(
            f"{opened.prefix.rstrip('.')}: scales folded into {len(found.folds)} of "
            f"{len(folds)} places ({where}); rounding loses {found.after:.3g} of the "
            f"block's output, {found.before:.3g} without"
        )
