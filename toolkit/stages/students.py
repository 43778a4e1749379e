"""The student a draft begins as: chosen, cut, and written as a checkpoint."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from ..draft.activity import watch
from ..draft.contract import require_servable
from ..draft.settings import Student
from ..draft.shape import Shape, configured, cut, most_missed
from ..generate.proposers.skipping import ranked
from ..model.cast import set_compute_dtype
from ..model.expanded import expanded
from ..model.fresh import initial_weights
from ..model.load import Loaded, compute_dtype
from ..model.tokens import require_same_tokens
from ..run.files import remove_folder
from .context import Context, write_checkpoint

# Shares of the blocks that `auto` tries to do with.
SHARES = (0.125, 0.25, 0.375, 0.5)


class Students:
    """Makes students for a target.

    Args:
        target: the model that will be served.
        tokens: of answers, int32 [1, L], to see what of the source is missed least.

    Raises:
        UserError: the source has other tokens than the target.
    """

    def __init__(
        self, config: Student, context: Context, target: Loaded, tokens: mx.array
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
        self.context.report.say(
            f"speed-up predicted by number of blocks: {tried}; taking "
            f"{len(best.layers)}"
        )
        return self._write(folder, best)

    def _source(self) -> Loaded:
        """The model that is cut, dense, in its stored type."""
        context, name = self.context, self.config.source
        path = context.current.reference
        if name:
            path = context.named(name)
        loaded = context.load(path, compute="stored")
        place = str(name or path)
        require_same_tokens(
            self.target.tokenizer, loaded.tokenizer, role="draft", place=place
        )
        if "quantization" in loaded.config:
            loaded, _ = expanded(loaded, loaded.dtype)
        return loaded

    def _shapes(self) -> list[Shape]:
        """Those to choose from."""
        config, count = self.config, len(self.source.model.layers)
        sizes = (config.hidden_size, config.intermediate_size)
        if isinstance(config.layers, list):
            return [Shape(tuple(sorted(config.layers)), *sizes)]
        counts = [config.layers]
        if config.layers == "auto":
            counts = sorted({max(1, math.ceil(share * count)) for share in SHARES})
        if config.fresh:
            return [Shape(tuple(range(counts[0])), *sizes)]
        if max(counts) >= count:
            return [Shape(tuple(range(min(max(counts), count))), *sizes)]
        order = ranked(self.source.model, self.tokens)
        return [Shape(most_missed(order, kept), *sizes) for kept in counts]

    def _write(self, folder: Path, shape: Shape) -> Path:
        source, config = self.source, self.source.config
        if self.config.fresh:
            # A fresh one need not be smaller than the model its shape is taken from.
            config = config | {"num_hidden_layers": len(shape.layers)}
        config = configured(config, shape)
        config["eos_token_id"] = self.target.config.get("eos_token_id")
        tokens = len(self.target.tokenizer.get_vocab())
        require_servable(config, self.target.config, tokens, place=str(source.path))
        if self.config.fresh:
            names = {v: k for k, v in vars(mx).items() if isinstance(v, mx.Dtype)}
            config["torch_dtype"] = names[source.dtype]
            weights = initial_weights(config, self.context.seed)
        else:
            activity = None
            if shape.is_narrower:
                activity = watch(source.model, self.tokens)
            weights = cut(source.model, self.weights, shape, activity)
        # It speaks as the target does, whatever it is cut from.
        like = replace(source, config=config, path=self.target.path)
        write_checkpoint(folder, like, weights)
        kept = ", ".join(map(str, shape.layers))
        made = "fresh" if self.config.fresh else f"blocks {kept} of {source.path}"
        self.context.report.say(f"student: {made}")
        return folder
