"""Scales of channels that move between layers: those of SmoothQuant, and of AWQ.

Each channel of a layer's inputs is divided by a scale, and the weights of the layer are
multiplied by it, at the places that `scale_mappings` finds. So the model computes the
same before it is quantized. SmoothQuant (arXiv 2211.10438) evens out the inputs, of
which a few channels are much larger than the others of their group. AWQ (arXiv
2306.00978) protects the weights that these channels are multiplied by.

The scales are small, and are kept on disk by block, so that a killed run resumes. The
scaled weights are computed when they are read.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ....config.quant_spec import QuantSpec
from ....config.quantize import PTQConfig
from ....errors import UserError
from ....files.artifacts import ArtifactStore
from ....models.blockwise import BlockwiseModel, cast
from ....models.hooks import capture_inputs, tokens_of_experts
from ..base import PTQContext, Weights
from ..gptq.clipping import fitted_rows
from .scale_mappings import ScaleMapping, find_mappings, preserves_output

# Tokens that the magnitudes of inputs are taken from, at most, as their hidden states
# are in memory, and tokens of a forward pass.
MAX_TOKENS, BATCH_TOKENS = 1 << 13, 1 << 11
# AWQ: powers of the mean magnitude, of which fitted grids need lower ones than RTN, and
# tokens whose outputs are compared.
POWERS, SEARCH_TOKENS = (0.0, 0.1, 0.2, 0.3, 0.45, 0.6), 1 << 10
# Smallest magnitude of a channel relative to the largest.
MIN_MAGNITUDE = 1e-4
SCALES = "scales.safetensors"

# Tokens [B, L], and whether each is before the padding.
Shard = tuple[mx.array, mx.array]


@dataclass(frozen=True)
class ChannelScales:
    """The scales of a model.

    Attributes:
        places: mappings with the paths of layers in the model, and the scale of each,
            in the order in which they were computed.
    """

    places: list[tuple[ScaleMapping, mx.array]]

    def write(self, folder: Path) -> dict:
        """Write the scales; returns the mappings as JSON values."""
        scales = {str(i): scale for i, (_, scale) in enumerate(self.places)}
        mx.save_safetensors(str(folder / SCALES), scales)
        return {"mappings": [asdict(mapping) for mapping, _ in self.places]}

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


class SmoothQuant:
    """Scales by the ranges of inputs and weights (equation 4 of the paper)."""

    name, hint = "smoothquant", "remove smoothing_strength"
    # Inputs of experts are not quantized, and values that heads share not measured.
    every_place = False

    def __init__(self, config: PTQConfig):
        self.key = self.strength = config.smoothing

    def magnitude(self, rows: mx.array) -> mx.array:
        """Sum over sequences of the largest input, [K], of absolute ones [n, L, K].

        The maximum over all tokens, as in the paper, grows with the number of tokens
        until single tokens decide.
        """
        return rows.max(axis=1).sum(axis=0)

    def scale(self, mapping, weights, specs, magnitudes, error) -> mx.array:
        """The scale of a mapping; see `_BlockFinder.run`."""
        paths = [path for path in mapping.consumers if path in specs]
        columns = [mx.abs(weights[f"{path}.weight"]) for path in paths]
        columns = [each.reshape(-1, each.shape[-1]).max(axis=0) for each in columns]
        inputs = magnitudes[paths[0]]
        return smoothing_scale(inputs, mx.stack(columns).max(axis=0), self.strength)


class AWQScales:
    """Scales by the error of the block's output while its layers are rounded.

    A scale is the mean magnitude of the inputs to a power. Power 0 changes nothing, so
    the error never rises. Grids are fitted as for the result: RTN has other powers.
    """

    name, hint, every_place = "awq", "method: rtn", True
    key = POWERS, SEARCH_TOKENS

    def __init__(self, context: PTQContext):
        self.context = context

    def magnitude(self, rows: mx.array) -> mx.array:
        """Sums of absolute inputs [n, L, K] over all tokens."""
        return rows.sum(axis=(0, 1))

    def scale(self, mapping, weights, specs, magnitudes, error) -> mx.array:
        """The scale of a mapping; see `_BlockFinder.run`."""
        inputs = mapping.channels(magnitudes[mapping.consumers[0]])
        others = self._rounded(weights, magnitudes, specs)

        def errors(powers: Iterable[float]) -> Iterator[float]:
            for power in powers:
                scale = power_scale(inputs, power)
                scaled = magnitudes | mapping.divided(magnitudes, scale)
                changed = mapping.apply(weights, scale)
                yield error(others | self._rounded(changed, scaled, specs))

        by_power = self.context.ranks.divide(POWERS, errors)
        return power_scale(inputs, POWERS[by_power.index(min(by_power))])

    def _rounded(
        self, weights: Weights, magnitudes: Weights, specs: dict[str, QuantSpec]
    ) -> Weights:
        """Parameters of the block, on fitted grids if their layer is quantized."""
        rounded, dtype = dict(weights), self.context.dtype
        for path in [path for path in specs if f"{path}.weight" in weights]:
            weight = weights[f"{path}.weight"]
            width = weight.shape[-1]
            # An expert may have no inputs.
            costs = positive(magnitudes.get(path, mx.ones(width))) ** 2
            costs = mx.broadcast_to(costs, (*weight.shape[:-2], width))
            grids = (
                fitted_rows(matrix, cost, specs[path], dtype).weight(
                    mx.float32 if specs[path].is_gguf else dtype
                )
                for matrix, cost in zip(
                    weight.reshape(-1, *weight.shape[-2:]),
                    costs.reshape(-1, width),
                    strict=True,
                )
            )
            rounded[f"{path}.weight"] = mx.stack([*grids]).reshape(weight.shape)
        return rounded


def smoothing_scale(inputs: mx.array, weights: mx.array, strength: float) -> mx.array:
    """SmoothQuant's scale, with the geometric mean that strength 0.5 gives.

    Weights and inputs then have the same range at any strength. The scales of nvfp4
    lose precision below 2 ** -6, so neither may be small.

    Args:
        inputs, weights: magnitudes [K] of a layer's input channels, and of the columns
            of the layers that share this input.
    """
    inputs, weights = mx.log(positive(inputs)), mx.log(positive(weights))
    scale = strength * inputs - (1 - strength) * weights
    return mx.exp(scale - scale.mean() + (inputs - weights).mean() / 2)


def power_scale(magnitudes: mx.array, power: float) -> mx.array:
    """Magnitudes [..., K] to a power, with the geometric mean 1."""
    logs = mx.log(positive(magnitudes))
    return mx.exp(power * (logs - logs.mean(axis=-1, keepdims=True)))


def positive(magnitudes: mx.array) -> mx.array:
    """Magnitudes [..., K] without zeros, and all 1 where none is positive."""
    largest = magnitudes.max(axis=-1, keepdims=True)
    return mx.where(largest == 0, 1, mx.maximum(magnitudes, MIN_MAGNITUDE * largest))


def smooth(context: PTQContext, config: PTQConfig) -> ChannelScales:
    """Find SmoothQuant's scales.

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
    try:
        scales = find_scales(context, SmoothQuant(config), config)
        if not scales.places:
            raise UserError(
                "no norm or linear layer of this model can take the scales of "
                "smoothing_strength",
                hint=SmoothQuant.hint,
            )
    except UserError as error:
        if config.smoothing_strength is not None:
            raise
        context.logger.info(f"SmoothQuant is not used: {error.message}")
        return ChannelScales([])
    count = len(scales.places)
    context.logger.info(f"smoothing_strength {config.smoothing:g}: {count} scales")
    return scales


def find_scales(
    context: PTQContext, objective: SmoothQuant | AWQScales, config: PTQConfig
) -> ChannelScales:
    """Find the scales of a model, or read those of an interrupted run.

    All processes have all tokens, and go through the same blocks.

    Args:
        context: its `reread` is not None.

    Raises:
        UserError: the model is not a plain sequence of blocks.
    """
    ranks, name = context.ranks, objective.name
    num_tokens = config.calibration.num_tokens or MAX_TOKENS
    batch = context.windows(min(num_tokens, MAX_TOKENS))
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
    known = [store.find_on_first(name, key) for key in keys]
    # Blocks up to the last unknown one give the inputs of the next.
    count = max((i + 1 for i, each in enumerate(known) if each is None), default=0)
    parts = batch.parts(BATCH_TOKENS) if count else []
    shards = [(mx.array(p.tokens), mx.array(p.seen.copy())) for p in parts]
    if count:
        blockwise.verify(shards[0][0][:1, :8])
    hidden = [cast(blockwise.embed(tokens), mx.float32) for tokens, _ in shards]
    mx.eval(hidden)
    finder, places = _BlockFinder(blockwise, context, objective, shards), []
    with context.logger.progress(len(blockwise), f"{name} block") as progress:
        for index in progress.track(range(len(blockwise))):
            found, artifact = ChannelScales([]), known[index]
            if index < count:
                hidden, found = finder.run(index, hidden, searches=artifact is None)
            if artifact is not None:
                file = str(artifact.folder / SCALES)
                scales = ranks.exchange(mx.load(file) if ranks.is_first else {})
                for number, values in enumerate(artifact.facts["mappings"]):
                    values |= {"consumers": tuple(values["consumers"])}
                    found.places.append((ScaleMapping(**values), scales[str(number)]))
            elif ranks.is_first:
                store.put(name, keys[index], found.write)
            places += found.places
    blockwise.unload()
    return ChannelScales(places)


@dataclass
class _BlockFinder:
    """Finds the scales of one block after the other.

    Attributes:
        known: mappings by the names and shapes of a block's parameters: equal blocks
            are searched once.
    """

    blockwise: BlockwiseModel
    context: PTQContext
    objective: "SmoothQuant | AWQScales"
    shards: list[Shard]
    known: dict[tuple, list[ScaleMapping]] = field(default_factory=dict)

    def run(
        self, index: int, hidden: list[mx.array], *, searches: bool
    ) -> tuple[list[mx.array], ChannelScales]:
        """The outputs of a block, and its scales if this searches for them.

        The objective gets a mapping, float32 parameters by name with the scales so far,
        the grids of layers to quantize by path, and magnitudes of inputs by path, of
        the layers with scaled inputs: [K], or [E, K] of experts with own scales. And
        the squared error of the output for other parameters, a function.
        """
        dtypes = dict(tree_flatten(self.blockwise.blocks[index].parameters()))
        dtypes = {name: value.dtype for name, value in dtypes.items()}
        prefix, places = f"{self.blockwise.prefix}{index}.", []
        specs = {
            path.removeprefix(prefix): spec
            for path, spec in self.context.specs.items()
            if path.startswith(prefix)
        }
        with self.blockwise.loaded_block(index, mx.float32) as block:
            run = partial(self.blockwise.run_block, index)
            mappings = self._mappings(block, run, hidden[0], specs) if searches else []
            magnitudes, outputs = self._run(block, run, mappings, hidden)
            error = partial(self._error, block, run, hidden, outputs)
            weights = dict(tree_flatten(block.parameters()))
            for mapping in mappings:
                arguments = mapping, weights, specs, magnitudes, error
                scale = self.objective.scale(*arguments)
                dtype = dtypes[f"{mapping.producer}.weight"]
                scale = mapping.round_scale(weights, scale, dtype)
                weights |= mapping.apply(weights, scale)
                magnitudes |= mapping.divided(magnitudes, scale)
                mx.eval(scale, magnitudes)
                consumers = tuple(prefix + path for path in mapping.consumers)
                producer = prefix + mapping.producer
                mapping = replace(mapping, producer=producer, consumers=consumers)
                places.append((mapping, scale))
        return outputs, ChannelScales(places)

    def _mappings(
        self, block: nn.Module, run: Callable, hidden: mx.array, specs: dict
    ) -> list[ScaleMapping]:
        """The mappings that feed a layer to quantize."""
        sample = partial(run, self.shards[0][0][:1]), hidden[:1]
        named = tree_flatten(block.parameters())
        shapes = tuple((name, *value.shape) for name, value in named)
        found = self.known.get(shapes)
        if found is None or not preserves_output(found, block, *sample):
            found = self.known[shapes] = find_mappings(block, *sample)
        fed, everything = dict(block.named_modules()), self.objective.every_place
        return [
            mapping
            for mapping in found
            if (everything or mapping.repeats == 1)
            and any(
                path in specs and (everything or isinstance(fed[path], nn.Linear))
                for path in mapping.consumers
            )
        ]

    def _run(
        self,
        block: nn.Module,
        run: Callable,
        mappings: list[ScaleMapping],
        hidden: list[mx.array],
    ) -> tuple[Weights, list[mx.array]]:
        """Magnitudes of inputs by path, and the outputs of the block."""
        sums: dict[int, mx.array] = {}
        outputs, weights = [], dict(tree_flatten(block.parameters()))
        # Of the first consumer that is not one of experts, if there is one.
        paths = [
            min(m.consumers, key=lambda p: weights[f"{p}.weight"].ndim)
            for m in mappings
        ]
        routed = [p for m, p in zip(mappings, paths, strict=True) if m.experts]
        for (tokens, seen), x in zip(self.shards, hidden, strict=True):
            with (
                tokens_of_experts(block, routed) as tokens_of,
                capture_inputs(block, paths) as captured,
            ):
                outputs.append(run(tokens, x))
            for i, (mapping, path) in enumerate(zip(mappings, paths, strict=True)):
                rows = mx.abs(captured.rows[path])
                if mapping.experts:
                    known = sums.get(i, mx.zeros(mapping.shape))
                    is_seen = seen.reshape(-1)[tokens_of(path, captured)]
                    rows = mx.where(is_seen[:, None], rows, 0)
                    sums[i] = known.at[captured.experts[path]].add(rows)
                    continue
                rows = rows.reshape(len(seen), -1, rows.shape[-1])
                # A layer may be called more or less often than once for each token.
                if rows.shape[:2] == seen.shape:
                    rows = mx.where(seen[..., None], rows, 0)
                sums[i] = sums.get(i, 0) + self.objective.magnitude(rows)
            mx.eval(outputs[-1], sums)
        count = sum(len(tokens) for tokens, _ in self.shards)
        # All consumers of a mapping have the same inputs.
        magnitudes = {
            path: sums[i] / count
            for i, mapping in enumerate(mappings)
            for path in mapping.consumers
        }
        return magnitudes, outputs

    def _error(
        self,
        block: nn.Module,
        run: Callable,
        hidden: list[mx.array],
        outputs: list[mx.array],
        weights: Weights,
    ) -> float:
        """The squared error of the output with other parameters, on some tokens."""
        original = block.parameters()
        block.update(tree_unflatten(list(weights.items())))
        total, left = 0.0, SEARCH_TOKENS
        for (tokens, seen), x, y in zip(self.shards, hidden, outputs, strict=True):
            rows = slice(max(1, left // tokens.shape[1]))
            change = run(tokens[rows], x[rows]) - y[rows]
            total += mx.square(change * seen[rows, :, None]).sum().item()
            left -= tokens[rows].size
            if left <= 0:
                break
        block.update(original)
        return total
