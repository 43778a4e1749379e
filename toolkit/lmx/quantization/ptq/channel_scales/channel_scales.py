"""Scales of channels that move between layers: find them block by block, apply them.

`scale_mappings` finds the places, and a `ScaleObjective` chooses the scale of each:
SmoothQuant's by the ranges of inputs and weights, AWQ's by the error of the block. The
model computes the same before it is quantized.

The scales are small, and are kept on disk by block, so that a killed run resumes. The
scaled weights are computed when they are read.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ....config.quant_spec import QuantSpec
from ....files.artifacts import ArtifactStore
from ....models.blockwise import BlockwiseModel, cast
from ....models.hooks import capture_inputs
from ..base import PTQContext, Weights
from .scale_mappings import ScaleMapping, find_mappings, preserves_output

# Tokens of a forward pass.
BATCH_TOKENS = 1 << 11
# Smallest magnitude of a channel relative to the largest.
MIN_MAGNITUDE = 1e-4
SCALES = "scales.safetensors"

# A mapping, and the layer whose inputs give its magnitudes.
MeasuredMapping = tuple[ScaleMapping, str]


@dataclass(frozen=True)
class Shard:
    """Tokens [B, L], whether each is before the padding, and the hidden states
    [B, L, width] in front of a block and behind it."""

    tokens: mx.array
    seen: mx.array
    before: mx.array
    after: mx.array | None = None


@dataclass(frozen=True)
class ScaledBlock:
    """A block whose scales are chosen.

    Attributes:
        specs: grid by path in the block of each layer to quantize.
        module: its parameters are float32.
        run: maps tokens and hidden states to the output.
        shards: with the full-precision output of the block.
        magnitudes: by path of the inputs of layers behind scales, as they are with the
            scales so far, [K]; of experts [E, K].
    """

    specs: dict[str, QuantSpec]
    module: nn.Module
    run: Callable[[mx.array, mx.array], mx.array]
    shards: list[Shard]
    magnitudes: Weights


class ScaleObjective(ABC):
    """How a method chooses scales.

    Attributes:
        name: of the method.
        key: what the scales depend on besides the model and the tokens.
        num_tokens: tokens that the magnitudes of inputs are taken from.
        hint: what to do if the blocks of a model cannot be run one by one.
    """

    name: str
    key: tuple
    num_tokens: int
    hint: str

    @abstractmethod
    def measured_layer(
        self, mapping: ScaleMapping, layers: dict[str, nn.Module]
    ) -> str | None:
        """The layer whose inputs give the magnitudes of a mapping; None = no scale.

        Args:
            layers: the quantized consumers of the mapping by path in the block.
        """

    @abstractmethod
    def magnitude(self, rows: mx.array) -> mx.array:
        """The sum over sequences of the magnitude of absolute inputs [n, L, K]."""

    @abstractmethod
    def scale(
        self, block: ScaledBlock, mapping: ScaleMapping, path: str, weights: Weights
    ) -> mx.array:
        """The positive scale of a mapping.

        Args:
            path: of the measured layer.
            weights: of the block, with the scales of the mappings before this one.
        """


@dataclass(frozen=True)
class ChannelScales:
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

    @classmethod
    def from_tensors(cls, mappings: list[dict], scales: Weights) -> "ChannelScales":
        """The inverse of the properties."""
        places = [
            ScaleMapping(**values | {"consumers": tuple(values["consumers"])})
            for values in mappings
        ]
        return cls([(m, scales[str(i)]) for i, m in enumerate(places)])

    def changed(self, weights: Weights) -> Weights:
        """The parameters that change, in their dtypes, lazily.

        Args:
            weights: of the model before it is scaled, by name.
        """
        scaled = dict(weights)
        for mapping, scale in self.places:
            names = (mapping.producer, *mapping.consumers)
            parameters = {
                name: cast(scaled[name], mx.float32)
                for path in names
                for name in (f"{path}.weight", f"{path}.bias")
                if name in scaled
            }
            scaled |= mapping.apply(parameters, scale)
        return {
            name: cast(value, weights[name].dtype)
            for name, value in scaled.items()
            if value is not weights[name]
        }

    def apply(self, model: nn.Module) -> nn.Module:
        """Scale the weights of a model, in place."""
        changed = self.changed(dict(tree_flatten(model.parameters())))
        model.update(tree_unflatten(list(changed.items())))
        return model

    def context(self, context: PTQContext) -> PTQContext:
        """The task of quantizing the scaled model."""
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


def find_scales(context: PTQContext, objective: ScaleObjective) -> ChannelScales:
    """Find the scales of a model, or read those of an interrupted run.

    All processes have all tokens, and go through the same blocks.

    Args:
        context: its `reread` is not None.

    Raises:
        UserError: the model is not a plain sequence of blocks.
    """
    batch, ranks = context.windows(objective.num_tokens), context.ranks
    key = hashlib.sha256(batch.tokens.tobytes() + batch.counted.tobytes())
    key.update(repr((objective.key, sorted(context.specs.items()))).encode())
    ranks.require_same(
        key.hexdigest(),
        "calibrates on other tokens",
        hint="give all machines the same dataset",
    )
    store = ArtifactStore(context.folder, context.logger.warning, ranks)
    blockwise = BlockwiseModel(context.model, context.reread, hint=objective.hint)
    keys = [f"{key.hexdigest()}-{index}" for index in range(len(blockwise))]
    known = [store.find_on_first(objective.name, key) for key in keys]
    # Later blocks are done, and earlier ones give the inputs of this one.
    last = max((i for i, each in enumerate(known) if each is None), default=-1)
    shards: list[Shard] = []
    if last >= 0:
        tokens = mx.array(batch.tokens[:1, :8])
        blockwise.verify(tokens)
        for part in batch.parts(BATCH_TOKENS):
            tokens = mx.array(part.tokens)
            hidden = cast(blockwise.embed(tokens), mx.float32)
            shards.append(Shard(tokens, mx.array(part.seen.copy()), hidden))
            mx.eval(hidden)
    finder, places = _Finder(blockwise, context, objective), []
    with context.logger.progress(len(blockwise), f"{objective.name} block") as progress:
        for index in progress.track(range(len(blockwise))):
            scales, artifact = ChannelScales([]), known[index]
            if index <= last:
                shards, scales = finder.block(index, shards, search=artifact is None)
            if artifact is None and ranks.is_first:
                store.put(objective.name, keys[index], partial(_write, scales))
            if artifact is not None:
                tensors = (
                    mx.load(str(artifact.folder / SCALES)) if ranks.is_first else {}
                )
                tensors = ranks.exchange(tensors)
                scales = ChannelScales.from_tensors(artifact.facts["mappings"], tensors)
            places += scales.places
    blockwise.unload()
    return ChannelScales(places)


def _write(scales: ChannelScales, folder: Path) -> dict:
    mx.save_safetensors(str(folder / SCALES), scales.scales)
    return {"mappings": scales.mappings}


class _Finder:
    """Finds the scales of one block after the other."""

    def __init__(
        self, blockwise: BlockwiseModel, context: PTQContext, objective: ScaleObjective
    ):
        self.blockwise, self.context, self.objective = blockwise, context, objective
        # By the names and shapes of a block's parameters: equal blocks are searched
        # once.
        self.known: dict[tuple, list[ScaleMapping]] = {}

    def block(
        self, index: int, shards: list[Shard], *, search: bool
    ) -> tuple[list[Shard], ChannelScales]:
        """The inputs of the next block, and the scales of this one, if searched."""
        module = self.blockwise.blocks[index]
        dtypes = {k: v.dtype for k, v in tree_flatten(module.parameters())}
        prefix, places = f"{self.blockwise.prefix}{index}.", []
        with self.blockwise.loaded_block(index, mx.float32) as module:
            run = partial(self.blockwise.run_block, index)
            specs = {
                path.removeprefix(prefix): spec
                for path, spec in self.context.specs.items()
                if path.startswith(prefix)
            }
            mappings = self._mappings(module, run, shards[0], specs) if search else []
            shards, magnitudes = self._run(module, run, mappings, shards)
            block = ScaledBlock(specs, module, run, shards, magnitudes)
            weights = dict(tree_flatten(module.parameters()))
            for mapping, path in mappings:
                scale = self.objective.scale(block, mapping, path, weights)
                dtype = dtypes[f"{mapping.producer}.weight"]
                scale = mapping.round_scale(weights, scale, dtype)
                weights |= mapping.apply(weights, scale)
                for name in mapping.consumers:
                    magnitudes[name] = magnitudes[name] / mapping.columns(scale)
                mx.eval(scale, magnitudes)
                consumers = tuple(prefix + path for path in mapping.consumers)
                producer = prefix + mapping.producer
                mapping = replace(mapping, producer=producer, consumers=consumers)
                places.append((mapping, scale))
        inputs = [replace(shard, before=shard.after, after=None) for shard in shards]
        return inputs, ChannelScales(places)

    def _mappings(
        self, module: nn.Module, run: Callable, shard: Shard, specs: Collection[str]
    ) -> list[MeasuredMapping]:
        """The mappings that the objective has a scale for, and the measured layers."""
        sample = partial(run, shard.tokens[:1]), shard.before[:1]
        named = tree_flatten(module.parameters())
        shapes = tuple((name, *value.shape) for name, value in named)
        found = self.known.get(shapes)
        if found is None or not preserves_output(found, module, *sample):
            found = self.known[shapes] = find_mappings(module, *sample)
        modules = dict(module.named_modules())
        mappings = []
        for mapping in found:
            fed = {path: modules[path] for path in mapping.consumers if path in specs}
            if fed and (path := self.objective.measured_layer(mapping, fed)):
                mappings.append((mapping, path))
        return mappings

    def _run(
        self,
        module: nn.Module,
        run: Callable,
        mappings: list[MeasuredMapping],
        shards: list[Shard],
    ) -> tuple[list[Shard], Weights]:
        """The shards with the outputs of the block, and magnitudes by path."""
        sums: Weights = {}
        ran = []
        for shard in shards:
            with capture_inputs(module, [path for _, path in mappings]) as captured:
                after = run(shard.tokens, shard.before)
            for mapping, path in mappings:
                rows = mx.abs(captured.rows[path])
                if mapping.experts:
                    known = sums.get(path, mx.zeros(mapping.shape))
                    sums[path] = known.at[captured.experts[path]].add(rows)
                    continue
                rows = rows.reshape(len(shard.seen), -1, rows.shape[-1])
                # A layer may be called more or less often than once for each token.
                if rows.shape[:2] == shard.seen.shape:
                    rows = mx.where(shard.seen[..., None], rows, 0)
                sums[path] = sums.get(path, 0) + self.objective.magnitude(rows)
            mx.eval(after, sums)
            ran.append(replace(shard, after=after))
        count = sum(len(shard.tokens) for shard in shards)
        # All layers behind a scale have the same inputs.
        return ran, {
            name: sums[path] / count
            for mapping, path in mappings
            for name in mapping.consumers
        }


def positive(magnitudes: mx.array) -> mx.array:
    """Magnitudes [..., K] without zeros, and all 1 where none is positive."""
    largest = magnitudes.max(axis=-1, keepdims=True)
    return mx.where(largest == 0, 1, mx.maximum(magnitudes, MIN_MAGNITUDE * largest))
