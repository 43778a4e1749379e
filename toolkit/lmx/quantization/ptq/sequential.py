"""The sequential pipeline: quantize a model block by block.

Two streams of hidden states go through the model. One has the full-precision blocks
before it, the other the quantized blocks. So every layer is calibrated on the inputs
that it will receive. Methods without `needs_cross_moments` run only the second stream.

The weights and statistics of one block are in memory at a time. The streams and all
results are on disk, and a killed run resumes at the block where it stopped.

Several processes share the work. Shard i of the tokens goes through the blocks on rank
i % size, moments are summed over all, and a method divides its solver. All then go on
with the same weights.

The call chain from a recipe to the column update of GPTQ:

    GPTQ.quantize > SequentialPipeline.run > _quantize_block > GPTQ.quantize_group
    > gptq_solver.solve_layers > solve_rows > gptq > gptq_columns
"""

import hashlib
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from ...cpu import malloc, on_cpu
from ...files.artifacts import ArtifactStore
from ...files.atomic import remove
from ...interfaces import Progress
from ...models.blockwise import BlockwiseModel
from . import activation_cache
from .base import PTQMethod, QuantizedTensor
from .block_calibration import FULL, QUANTIZED, BlockCalibration, HeadCalibration
from .embeddings import embeddings, replaced_weights
from .input_statistics import InputStatistics
from .output_fisher import (
    estimate_output_fisher,
    gradient_norms,
    output_fisher,
    token_weights,
)

if TYPE_CHECKING:
    from ...data.calibration import CalibrationBatch

# Kinds of artifacts. Streams are the hidden states before a block, and only the newest
# are kept.
TENSORS, STREAMS = "tensors", "streams"
FILE = "tensors.safetensors"
# Keys of tensors; those of a block have the number of blocks that are then done.
EMBEDDINGS, HEAD = "embeddings", "head"
TOKENS_PER_COLUMN = 8
MIN_TOKENS = 1 << 15
BATCH_TOKENS = 2048
# Freed memory that MLX may keep, as it counts too if a model hardly fits.
CACHE_BYTES = 1 << 29


def default_num_tokens(width: int) -> int:
    """Calibration tokens for a model whose widest layer has this many inputs."""
    return max(MIN_TOKENS, TOKENS_PER_COLUMN * width)


class SequentialPipeline:
    """Runs a calibrated method over the blocks of a model.

    Args:
        method: its hooks are called for every block.
        windows: calibration tokens.
        folder: for the state of the run, which all its processes see. They write it
            together, so any number of processes resumes a run.
        key: digest of everything else that the result depends on. A state with another
            key is dropped.
        compute: dtype to run blocks in.
        batch_tokens: tokens that go through a block together, in whole windows.

    Raises:
        UserError: the model is not a plain sequence of blocks.
    """

    def __init__(
        self,
        method: PTQMethod,
        windows: "CalibrationBatch",
        folder: Path,
        *,
        key: str,
        compute: mx.Dtype,
        batch_tokens: int,
    ):
        context = method.context
        self.method = method
        self.context = context
        self.model: nn.Module = context.model
        shards = windows.parts(batch_tokens)
        self.tokens = [mx.array(shard.tokens) for shard in shards]
        self.counted = [mx.array(shard.counted) for shard in shards]
        self.num_compared = 0
        if method.needs_cross_moments:
            share = method.max_compared_tokens / windows.size
            self.num_compared = min(len(shards), ceil(share * len(shards)))
        self.folder = folder
        self.ranks = context.ranks
        self.key = key
        self.state = ArtifactStore(folder, context.logger.warning, self.ranks)
        self.compute = compute
        self.blockwise = BlockwiseModel(context.model, context.reread)
        self._block_paths: list[list[str]] = [[] for _ in self.blockwise.blocks]
        self._outer_paths = []
        for path in context.specs:
            if path.startswith(self.blockwise.prefix):
                name = path.removeprefix(self.blockwise.prefix)
                index, _, inner = name.partition(".")
                self._block_paths[int(index)].append(inner)
            else:
                self._outer_paths.append(path)

    @classmethod
    def from_method(cls, method: PTQMethod) -> "SequentialPipeline":
        """The pipeline with the calibration tokens that a method's recipe asks for."""
        config, context = method.config, method.context
        modules = dict(context.model.named_modules())
        width = max(modules[path].weight.shape[-1] for path in context.specs)
        recommended = TOKENS_PER_COLUMN * min(width, method.columns_at_once or width)
        num_tokens = config.calibration.num_tokens or default_num_tokens(width)
        windows = context.windows(num_tokens)
        if windows.size < recommended:
            context.logger.warning(
                f"calibration has {windows.size:,} tokens; at least {recommended:,} "
                "are recommended for this model and method"
            )
        key = hashlib.sha256(windows.tokens.tobytes() + windows.counted.tobytes())
        key.update(config.model_dump_json().encode())
        key.update(repr(sorted(context.specs.items())).encode())
        context.ranks.require_same(
            key.hexdigest(),
            "calibrates on other tokens",
            hint="give all machines the same dataset",
        )
        return cls(
            method,
            windows,
            context.folder / "sequential",
            key=key.hexdigest(),
            compute=mx.float32 if on_cpu() else context.dtype,
            batch_tokens=BATCH_TOKENS,
        )

    def run(self) -> dict[str, mx.array]:
        """Quantize all layers.

        Returns:
            Packed codes, scales and biases by name, lazily loaded.
        """
        count, logger = len(self.blockwise), self.context.logger
        with (
            _low_memory(),
            logger.progress(count, "quantization", percent=True) as progress,
        ):
            progress.advance(0, "Fisher information and embeddings")
            first = None
            if self.ranks.is_first:
                first = self._num_done()
                if first is None:
                    remove(self.folder)
            first = self.ranks.broadcast_object(first)
            if first is None:
                self._write_first_streams()
                first = 0
            progress.skip(first)
            for index in range(first, count):
                progress.advance(0, f"block {index + 1} of {count}")
                self._quantize_block(index, progress)
            self._quantize_head()
        names = [*range(1, count + 1), EMBEDDINGS, HEAD]
        files = [self._tensors(name) / FILE for name in names]
        return {k: v for file in files for k, v in mx.load(str(file)).items()}

    def _write_first_streams(self) -> None:
        """Quantize the embeddings, and write the streams before the first block."""
        self.blockwise.verify(self.tokens[0][:1, :8])
        self.ranks.wait_for_all()
        quantized = self._quantize_embeddings()
        with self.state.together(STREAMS, self._key(0)) as target:
            self._embed(target, FULL, self.num_compared)
            weights = {path: layer.weight for path, layer in quantized.items()}
            with replaced_weights(self.model, weights):
                self._embed(target, QUANTIZED, len(self.tokens))
        self.blockwise.unload()

    def _num_done(self) -> int | None:
        """Number of blocks before the newest streams on disk.

        None if no block can begin, or if anything that is needed is damaged or belongs
        to another run: the streams that made it are gone.
        """
        streams = self.state.keys(STREAMS)
        for done in range(len(self.blockwise), -1, -1):
            if self.state.find(STREAMS, self._key(done)):
                needed = map(self._key, [EMBEDDINGS, *range(1, done + 1)])
                if all(self.state.find(TENSORS, key) for key in needed):
                    self.state.remove_others(STREAMS, [self._key(done)])
                    return done
                break
        if streams:
            self.context.logger.warning(
                f"{self.folder}: damaged or of other settings, quantizing again from "
                "the first block"
            )
        return None

    def _key(self, name: str | int) -> str:
        """The key of tensors, or of the streams after so many blocks."""
        return f"{self.key}-{name}"

    def _tensors(self, name: str | int) -> Path:
        """The folder of tensors that exist."""
        return self.state.folder(TENSORS, self._key(name))

    def _streams(self, done: int) -> Path:
        """The folder of the streams after so many blocks."""
        return self.state.folder(STREAMS, self._key(done))

    def _quantize_embeddings(self) -> dict[str, QuantizedTensor]:
        """Quantize embeddings first, so that the blocks compensate for their errors."""
        quantized: dict[str, QuantizedTensor] = {}
        weights = embeddings(self.model, self._outer_paths)
        no_paths = [[] for _ in self._block_paths]
        with self.state.together(TENSORS, self._key(EMBEDDINGS)) as target:
            statistics = estimate_output_fisher(
                self.blockwise,
                list(weights) if self.method.weighs_embeddings else [],
                self._block_paths if self.method.weighs_outputs else no_paths,
                self.tokens,
                self.counted,
                compute=self.compute,
                folder=target,
                max_tokens=self.method.max_fisher_tokens,
                logger=self.context.logger,
                ranks=self.ranks,
            )
            for path, weight in weights.items():
                quantized |= self.method.quantize_group(
                    {path: weight}, statistics.get(path)
                )
            if self.ranks.is_first:
                mx.save_safetensors(str(target / FILE), _by_name(quantized))
        return quantized

    def _save(self, name: str | int, tensors: dict[str, mx.array]) -> None:
        """Write tensors, which all processes have."""
        if self.ranks.is_first:
            self.state.put(
                TENSORS,
                self._key(name),
                lambda folder: mx.save_safetensors(str(folder / FILE), tensors),
            )
        self.ranks.wait_for_all()

    def _embed(self, folder: Path, stream: str, count: int) -> None:
        """Write the hidden states before the first block, of the first shards."""
        for shard in self.ranks.shard(range(count)):
            hidden = {"hidden": self.blockwise.embed(self.tokens[shard])}
            activation_cache.save(folder, stream, shard, hidden)

    def _quantize_block(self, index: int, progress: Progress) -> None:
        prefix, tensors = f"{self.blockwise.prefix}{index}.", {}
        with (
            self.state.together(STREAMS, self._key(index + 1)) as after,
            self.blockwise.loaded_block(index, self.compute) as block,
        ):
            modules = dict(block.named_modules())
            calibration = BlockCalibration(
                self.blockwise,
                index,
                self._block_paths[index],
                self.tokens,
                self._streams(index),
                after,
                num_compared=self.num_compared,
                ranks=self.ranks,
            )
            calibration.run_full_precision()
            called = {path for group in calibration.groups for path in group}
            uncalled = [[p] for p in self._block_paths[index] if p not in called]
            groups = [*calibration.groups, *uncalled]
            for group in groups:
                # Passed on without a name, so that the method can free them.
                is_called = group[0] in called
                quantized = self.method.quantize_group(
                    {prefix + path: modules[path].weight for path in group},
                    self._statistics(index, group, calibration) if is_called else None,
                )
                for path, layer in quantized.items():
                    weight = layer.weight.astype(self.compute)
                    modules[path.removeprefix(prefix)].weight = weight
                tensors |= _by_name(quantized)
                # The passes over the tokens take longer than the solver.
                progress.advance(1 / len(groups))
            calibration.run_quantized()
            self._save(index + 1, tensors)
        if self.ranks.is_first:
            self.state.remove_others(STREAMS, [self._key(index + 1)])
        self.context.logger.debug(
            f"block {index + 1} of {len(self.blockwise)} quantized"
        )

    def _statistics(
        self, index: int, group: list[str], calibration: BlockCalibration
    ) -> InputStatistics:
        """Statistics of a group's input, with the Fisher information of its outputs."""
        prefix, folder = f"{self.blockwise.prefix}{index}.", self._tensors(EMBEDDINGS)
        norms = gradient_norms(folder, index)
        known = [norms[path] for path in group if path in norms]
        weights = token_weights(sum(known) if known else None, self.counted)
        statistics = calibration.statistics(group, weights)
        fisher = output_fisher(folder, index)
        statistics.output_fisher = {prefix + p: fisher[p] for p in group if p in fisher}
        return statistics

    def _quantize_head(self) -> None:
        """Quantize the layers outside the blocks that are not done yet."""
        if self.state.find_on_first(TENSORS, self._key(HEAD)):
            return
        modules = dict(self.model.named_modules())
        done = embeddings(self.model, self._outer_paths)
        paths = [path for path in self._outer_paths if path not in done]
        calibration = HeadCalibration(
            self.blockwise,
            paths,
            self.tokens,
            self.counted,
            self._streams(len(self.blockwise)),
            num_compared=self.num_compared,
            ranks=self.ranks,
        )
        groups = calibration.groups()
        called = {path for group in groups for path in group}
        quantized: dict[str, QuantizedTensor] = {}
        for group in groups:
            weights = {path: modules[path].weight for path in group}
            quantized |= self.method.quantize_group(
                weights, calibration.statistics(group)
            )
        for path in paths:
            if path not in called:
                quantized |= self.method.quantize_group(
                    {path: modules[path].weight}, None
                )
        self._save(HEAD, _by_name(quantized))
        self.blockwise.unload()


def _by_name(layers: dict[str, QuantizedTensor]) -> dict[str, mx.array]:
    return {
        f"{path}.{name}": value
        for path, layer in layers.items()
        for name, value in layer.tensors.items()
    }


@contextmanager
def _low_memory():
    limit = mx.set_cache_limit(CACHE_BYTES)
    try:
        with malloc.low_memory():
            yield
    finally:
        mx.set_cache_limit(limit)
