"""SmoothQuant (arXiv 2211.10438): move the range of activations into weights.

A few channels of a layer's inputs are much larger than the others of their group, and
the quantized inputs lose the others. Each channel of the inputs is divided by a scale,
and the weights of the layer are multiplied by it (equation 4 of the paper), at the
places that `scale_mappings` finds. So the model computes the same before it is
quantized.

The scales are small, and are kept on disk. The smoothed weights are computed when they
are read.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ....config.quantize import PTQConfig
from ....errors import UserError
from ....files.artifacts import ArtifactStore
from ....interfaces import Progress
from ....models.blockwise import BlockwiseModel, cast
from ....models.hooks import capture_inputs
from ..base import PTQContext, Weights
from .scale_mappings import ScaleMapping, find_mappings, preserves_output

# Tokens that the largest inputs are taken from, if the recipe gives no number, and
# tokens of a forward pass.
NUM_TOKENS, BATCH_TOKENS = 1 << 13, 1 << 11
# Smallest magnitude of a channel relative to the largest.
MIN_MAGNITUDE = 1e-4
SCALES = "scales.safetensors"
HINT = "remove smoothing_strength"

# Tokens [B, L], and whether each is before the padding.
Shard = tuple[mx.array, mx.array]


@dataclass(frozen=True)
class Smoothing:
    """The scales of a model.

    Attributes:
        places: mappings with the paths of layers in the model, and the scale of each,
            in the order in which they were computed.
    """

    places: list[tuple[ScaleMapping, mx.array]]

    @property
    def mappings(self) -> list[dict]:
        """The mappings as JSON values."""
        return [asdict(mapping) for mapping, _ in self.places]

    @property
    def scales(self) -> dict[str, mx.array]:
        """The scales by the number of their place."""
        return {str(i): scale for i, (_, scale) in enumerate(self.places)}

    def changed(self, weights: Weights) -> Weights:
        """The parameters that change, in their dtypes, lazily.

        Args:
            weights: of the model before smoothing, by name.
        """
        smoothed = dict(weights)
        for mapping, scale in self.places:
            names = (mapping.producer, *mapping.consumers)
            parameters = {
                name: cast(smoothed[name], mx.float32)
                for path in names
                for name in (f"{path}.weight", f"{path}.bias")
                if name in smoothed
            }
            smoothed |= mapping.apply(parameters, scale)
        return {
            name: cast(value, weights[name].dtype)
            for name, value in smoothed.items()
            if value is not weights[name]
        }

    def apply(self, model: nn.Module) -> nn.Module:
        """Smooth the weights of a model, in place."""
        changed = self.changed(dict(tree_flatten(model.parameters())))
        model.update(tree_unflatten(list(changed.items())))
        return model

    def context(self, context: PTQContext) -> PTQContext:
        """The task of quantizing the smoothed model."""
        if not self.places:
            return context

        def reread() -> nn.Module:
            return self.apply(context.reread())

        return replace(context, model=reread(), reread=reread)

    def unquantized(self, context: PTQContext) -> Weights:
        """The changed weights of layers that are not quantized, lazily."""
        if not self.places:
            return {}
        changed = self.changed(dict(tree_flatten(context.reread().parameters())))
        quantized = {f"{path}.weight" for path in context.specs}
        return {name: v for name, v in changed.items() if name not in quantized}


def smooth(context: PTQContext, config: PTQConfig) -> Smoothing:
    """Find the scales of a model, or read those of an interrupted run.

    Rank 0 does the work; all processes get the scales.

    Args:
        context: its `reread` is not None.
        config: its `smoothing` is not 0.

    Returns:
        No places if the model cannot be smoothed and the recipe does not name
        `smoothing_strength`.

    Raises:
        UserError: the recipe names it, and the model is not a plain sequence of blocks,
            or has no place for a scale in front of a layer whose inputs are quantized.
    """
    ranks, smoothing = context.ranks, Smoothing([])
    if ranks.is_first:
        smoothing = _smooth(context, config)
    mappings = ranks.broadcast_object(smoothing.mappings)
    return _from_tensors(mappings, ranks.exchange(smoothing.scales))


def _smooth(context: PTQContext, config: PTQConfig) -> Smoothing:
    strength = config.smoothing
    assert context.reread is not None
    batch = context.windows(config.calibration.num_tokens or NUM_TOKENS)
    key = hashlib.sha256(batch.tokens.tobytes() + batch.counted.tobytes())
    key.update(repr((strength, sorted(context.specs.items()))).encode())
    store = ArtifactStore(context.folder, context.logger.warning)
    known = store.find("smoothquant", key.hexdigest())
    if known:
        scales = mx.load(str(known.folder / SCALES))
        smoothing = _from_tensors(known.facts["mappings"], scales)
    else:
        parts, logger = batch.parts(BATCH_TOKENS), context.logger
        shards = [(mx.array(p.tokens), mx.array(p.seen.copy())) for p in parts]
        try:
            blockwise = BlockwiseModel(context.model, context.reread, hint=HINT)
            with logger.progress(len(blockwise), "smoothing block") as progress:
                args = context, strength, shards, blockwise, progress
                smoothing = Smoothing(list(_places(*args)))
            if not smoothing.places:
                raise UserError(
                    "no norm or linear layer of this model can take the scales of "
                    "smoothing_strength",
                    hint=HINT,
                )
        except UserError as error:
            if config.smoothing_strength is not None:
                raise
            context.logger.info(f"SmoothQuant is not used: {error.message}")
            return Smoothing([])

        def write(folder: Path) -> dict:
            mx.save_safetensors(str(folder / SCALES), smoothing.scales)
            return {"mappings": smoothing.mappings}

        store.put("smoothquant", key.hexdigest(), write)
    count = len(smoothing.places)
    context.logger.info(f"smoothing_strength {strength:g}: {count} scales")
    return smoothing


def _places(
    context: PTQContext,
    strength: float,
    shards: list[Shard],
    blockwise: BlockwiseModel,
    progress: Progress,
) -> Iterator[tuple[ScaleMapping, mx.array]]:
    """The mappings of all blocks with their scales."""
    blockwise.verify(shards[0][0][:1, :8])
    hidden = [cast(blockwise.embed(tokens), mx.float32) for tokens, _ in shards]
    mx.eval(hidden)
    # By the names and shapes of a block's parameters: equal blocks are searched once.
    known: dict[tuple, list[ScaleMapping]] = {}
    for index, module in enumerate(progress.track(blockwise.blocks)):
        dtypes = {k: v.dtype for k, v in tree_flatten(module.parameters())}
        prefix = f"{blockwise.prefix}{index}."
        with blockwise.loaded_block(index, mx.float32) as block:
            run = partial(blockwise.run_block, index)
            sample = partial(run, shards[0][0][:1]), hidden[0][:1]
            named = tree_flatten(block.parameters())
            shapes = tuple((name, *value.shape) for name, value in named)
            found = known.get(shapes)
            if found is None or not preserves_output(found, block, *sample):
                found = known[shapes] = find_mappings(block, *sample)
            modules = dict(block.named_modules())
            # With a layer that each feeds and whose inputs are quantized: no expert.
            mappings: list[tuple[ScaleMapping, str]] = []
            for mapping in found:
                fed = [p for p in mapping.consumers if prefix + p in context.specs]
                if linear := [p for p in fed if isinstance(modules[p], nn.Linear)]:
                    mappings.append((mapping, linear[0]))
            paths = [path for _, path in mappings]
            inputs, hidden = _run_block(block, run, paths, shards, hidden)
            weights = dict(tree_flatten(block.parameters()))
            for mapping, path in mappings:
                names = [p for p in mapping.consumers if prefix + p in context.specs]
                columns = []
                for name in names:
                    weight = mx.abs(weights[f"{name}.weight"])
                    columns.append(weight.reshape(-1, weight.shape[-1]).max(axis=0))
                largest = mx.stack(columns).max(axis=0)
                scale = smoothing_scale(inputs[path], largest, strength)
                dtype = dtypes[f"{mapping.producer}.weight"]
                scale = mapping.round_scale(weights, scale, dtype)
                weights |= mapping.apply(weights, scale)
                mx.eval(scale)
                consumers = tuple(prefix + path for path in mapping.consumers)
                producer = prefix + mapping.producer
                yield replace(mapping, producer=producer, consumers=consumers), scale
    blockwise.unload()


def _run_block(
    block: nn.Module,
    run: Callable[[mx.array, mx.array], mx.array],
    paths: list[str],
    shards: list[Shard],
    hidden: list[mx.array],
) -> tuple[dict[str, mx.array], list[mx.array]]:
    """Magnitudes [K] of the inputs of layers by path, and the outputs of the block.

    A magnitude is the largest one of a sequence, as a mean over sequences. The maximum
    over all tokens, as in the paper, grows with the number of tokens until single
    tokens decide.
    """
    sums: dict[str, mx.array] = dict.fromkeys(paths, mx.array(0.0))
    outputs = []
    for (tokens, seen), x in zip(shards, hidden, strict=True):
        with capture_inputs(block, paths) as captured:
            outputs.append(run(tokens, x))
        for path, rows in captured.rows.items():
            rows = mx.abs(rows).reshape(len(seen), -1, rows.shape[-1])
            # A layer may be called more or less often than once for each token.
            if rows.shape[:2] == seen.shape:
                rows = mx.where(seen[..., None], rows, 0)
            sums[path] = sums[path] + rows.max(axis=1).sum(axis=0)
        mx.eval(outputs[-1], sums)
    count = sum(len(tokens) for tokens, _ in shards)
    return {path: value / count for path, value in sums.items()}, outputs


def smoothing_scale(inputs: mx.array, weights: mx.array, strength: float) -> mx.array:
    """Equation 4 of the paper, with the geometric mean that strength 0.5 gives.

    Weights and inputs then have the same range at any strength. The scales of nvfp4
    lose precision below 2 ** -6, so neither may be small.

    Args:
        inputs, weights: magnitudes [K] of a layer's input channels, and of the columns
            of the layers that share this input.
    """
    inputs, weights = mx.log(_positive(inputs)), mx.log(_positive(weights))
    scale = strength * inputs - (1 - strength) * weights
    return mx.exp(scale - scale.mean() + (inputs - weights).mean() / 2)


def _positive(magnitudes: mx.array) -> mx.array:
    largest = magnitudes.max()
    return mx.where(largest == 0, 1, mx.maximum(magnitudes, MIN_MAGNITUDE * largest))


def _from_tensors(mappings: list[dict], scales: Weights) -> Smoothing:
    """The inverse of the properties of `Smoothing`."""
    places = [
        ScaleMapping(**values | {"consumers": tuple(values["consumers"])})
        for values in mappings
    ]
    return Smoothing([(m, scales[str(i)]) for i, m in enumerate(places)])
