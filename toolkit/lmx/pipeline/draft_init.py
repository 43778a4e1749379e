"""The student a draft begins as: chosen, cut, and written as a checkpoint."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from ..config.draft import DraftModelConfig
from ..data.tokenizer_files import require_same_tokenizer
from ..draft.pruning import (
    PrunedShape,
    channel_importance,
    most_important_blocks,
    prune,
    pruned_config,
)
from ..draft.report import require_servable
from ..generation.speculative.layer_skip import rank_layers
from ..models.from_scratch import initial_weights
from ..models.loader import LoadedModel, compute_dtype, set_compute_dtype
from ..quantization.dequantize import dequantized_model
from ..run.fs import remove_folder
from .context import StageContext, write_model

# Shares of the blocks that `auto` tries to do with.
SHARES = (0.125, 0.25, 0.375, 0.5)


class DraftInitializer:
    """Makes students for a target.

    Args:
        target: the model that will be served.
        tokens: of answers, int32 [1, L], to see what of the source is missed least.

    Raises:
        UserError: the source has other tokens than the target.
    """

    def __init__(
        self,
        config: DraftModelConfig,
        context: StageContext,
        target: LoadedModel,
        tokens: mx.array,
    ):
        self.config = config
        self.context = context
        self.target = target
        self.tokens = tokens
        self.source = self._source()
        self.weights = dict(tree_flatten(self.source.model.parameters()))
        compute = compute_dtype("auto", self.source.dtype)
        set_compute_dtype(self.source.model, compute)

    def begin(self, predicted: Callable[[Path], float]) -> Path:
        """The folder of the student, made once.

        Args:
            predicted: the speed-up to expect of the student in a folder.
        """
        folder = self.context.folder / "student"
        if folder.is_dir():
            return folder
        shapes = self._shapes()
        if len(shapes) == 1:
            return self._write(folder, shapes[0])
        found = {}
        for shape in shapes:
            name = f"candidate-{len(shape.layers)}"
            candidate = self._write(self.context.folder / name, shape)
            found[shape] = predicted(candidate)
            remove_folder(candidate)
        best = max(found, key=found.get)
        tried = ", ".join(f"{len(s.layers)}: {gain:.2f}x" for s, gain in found.items())
        self.context.logger.info(
            f"speed-up predicted by number of blocks: {tried}; taking "
            f"{len(best.layers)}"
        )
        return self._write(folder, best)

    def _source(self) -> LoadedModel:
        """The model that is cut, dense, in its stored type."""
        context, name = self.context, self.config.init_from
        path = context.current.reference
        if name:
            path = context.named(name)
        loaded = context.load(path, compute="stored")
        place = str(name or path)
        require_same_tokenizer(
            self.target.tokenizer, loaded.tokenizer, role="draft", place=place
        )
        if "quantization" in loaded.config:
            loaded, _ = dequantized_model(loaded, loaded.dtype)
        return loaded

    def _shapes(self) -> list[PrunedShape]:
        """Those to choose from."""
        config, count = self.config, len(self.source.model.layers)
        sizes = (config.hidden_size, config.intermediate_size)
        if isinstance(config.num_layers, list):
            return [PrunedShape(tuple(sorted(config.num_layers)), *sizes)]
        counts = [config.num_layers]
        if config.num_layers == "auto":
            counts = sorted({max(1, math.ceil(share * count)) for share in SHARES})
        if config.from_scratch:
            return [PrunedShape(tuple(range(counts[0])), *sizes)]
        if max(counts) >= count:
            return [PrunedShape(tuple(range(min(max(counts), count))), *sizes)]
        order = rank_layers(self.source.model, self.tokens)
        return [
            PrunedShape(most_important_blocks(order, kept), *sizes) for kept in counts
        ]

    def _write(self, folder: Path, shape: PrunedShape) -> Path:
        source, config = self.source, self.source.config
        if self.config.from_scratch:
            # A fresh one need not be smaller than the model its shape is taken from.
            config = config | {"num_hidden_layers": len(shape.layers)}
        config = pruned_config(config, shape)
        config["eos_token_id"] = self.target.config.get("eos_token_id")
        tokens = len(self.target.tokenizer.get_vocab())
        require_servable(config, self.target.config, tokens, place=str(source.path))
        if self.config.from_scratch:
            names = {v: k for k, v in vars(mx).items() if isinstance(v, mx.Dtype)}
            config["torch_dtype"] = names[source.dtype]
            weights = initial_weights(config, self.context.seed)
        else:
            activity = None
            if shape.is_narrower:
                activity = channel_importance(source.model, self.tokens)
            weights = prune(source.model, self.weights, shape, activity)
        # It speaks as the target does, whatever it is cut from.
        like = replace(source, config=config, path=self.target.path)
        write_model(folder, like, weights)
        kept = ", ".join(map(str, shape.layers))
        made = (
            "fresh" if self.config.from_scratch else f"blocks {kept} of {source.path}"
        )
        self.context.logger.info(f"student: {made}")
        return folder
