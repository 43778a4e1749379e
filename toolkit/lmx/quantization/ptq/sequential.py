"""One walk through a model, block by block, in two streams of hidden states.

One stream has the full-precision blocks behind it, the other the quantized ones, so
every layer is quantized for the inputs it will get. A method that compares nothing with
full precision does without the first. Weights and second moments of one
block are in memory at a time; the streams and all that is done are on disk, and a walk
that was killed goes on at the block where it stopped.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ...config.quant_spec import QuantSpec
from ...cpu import malloc, on_cpu
from ...models.blockwise import BlockwiseModel
from ...run.fs import atomic_folder
from ..packing import expand, pack
from . import activation_cache
from .activation_cache import FULL, ROUNDED
from .base import PTQContext
from .block_calibration import BlockCalibration
from .block_context import Prepare, QuantizedBlock, close_block, prepare_block
from .embeddings import embeddings, given
from .fisher import token_weights
from .head_activations import HeadCalibration
from .input_statistics import InputStatistics
from .output_fisher import (
    backward_sensitivity_pass,
    drop_statistics,
    output_hessians,
    squares,
)

if TYPE_CHECKING:
    from ...data.calibration import CalibrationBatch


TENSORS = "tensors.safetensors"
EMBEDDINGS = "embeddings"


@dataclass(frozen=True)
class QuantizedTensor:
    """A layer as it is stored, and the dense weight it stands for."""

    tensors: dict[str, mx.array]
    weight: mx.array


# Quantizes layers that share an input: weights by path, what is known of that input,
# None when no hidden state goes into them.
Solve = Callable[
    [dict[str, mx.array], InputStatistics | None], dict[str, QuantizedTensor]
]
# Gives layers of a block something better, once it is quantized; by path.
Improve = Callable[[QuantizedBlock], dict[str, QuantizedTensor]]


class SequentialPipeline:
    """Leads a method through the blocks of a model.

    Args:
        model: its weights may be unread.
        paths: of the layers to quantize.
        windows: of calibration tokens.
        folder: where the walk keeps its state.
        key: what the walk depends on besides; another key begins anew.
        compute: the type to run blocks in.
        at_once: tokens that go through a block together, in whole windows.
        reread: see `Blockwise`.
        prepare: is shown every block before it is quantized.
        improve: is shown every block afterwards.
        compares: whether to run the full-precision stream too; it costs as much as the
            other. Without one moments have no `cross`, and nothing can be improved.
        weighs_embeddings: whether the method asks what errors in embeddings cost.
        weighs_outputs: whether it asks what errors in the outputs of layers cost.

    Raises:
        UserError: the model is not a plain sequence of blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        paths: list[str],
        windows: "CalibrationBatch",
        folder: Path,
        *,
        key: str,
        compute: mx.Dtype,
        at_once: int,
        info: Callable[[str], None],
        reread: Callable[[], nn.Module] | None = None,
        prepare: Prepare | None = None,
        improve: Improve | None = None,
        compares: bool = True,
        weighs_embeddings: bool = True,
        weighs_outputs: bool = False,
    ):
        self.model = model
        parts = windows.parts(at_once)
        self.tokens = [mx.array(part.tokens) for part in parts]
        self.counted = [mx.array(part.counted) for part in parts]
        self.folder = folder
        self.key = key
        self.compute = compute
        self.info = info
        self.prepare = prepare
        self.improve = improve
        self.compares = compares
        self.weighs_embeddings = weighs_embeddings
        self.weighs_outputs = weighs_outputs
        self.blockwise = BlockwiseModel(model, reread)
        self._inside: list[list[str]] = [[] for _ in self.blockwise.blocks]
        self._outside = []
        for path in paths:
            if path.startswith(self.blockwise.prefix):
                name = path.removeprefix(self.blockwise.prefix)
                number, _, rest = name.partition(".")
                self._inside[int(number)].append(rest)
            else:
                self._outside.append(path)

    def run(self, solve: Solve) -> dict[str, mx.array]:
        """Walk to the end.

        Returns:
            Codes, scales and biases by name, unread, of all layers, and the weights of
            others that `prepare` changed.
        """
        self._begin(solve)
        for number in range(self._done(), len(self.blockwise)):
            self._walk_block(number, solve)
        self._finish(solve)
        files = sorted(self.folder.glob(f"*/{TENSORS}"))
        return {
            name: value for file in files for name, value in mx.load(str(file)).items()
        }

    def _begin(self, solve: Solve) -> None:
        """Make the streams in front of the first block, unless that is done."""
        state = self.folder / "walk.json"
        if state.is_file() and json.loads(state.read_text()) == self.key:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.blockwise.check(self.tokens[0][:1, :8])
        found = self._quantize_embeddings(solve)
        with atomic_folder(self.folder / "0000") as place:
            if self.compares:
                self._enter(place, FULL)
            with given(self.model, {path: s.weight for path, s in found.items()}):
                self._enter(place, ROUNDED)
        self.blockwise.let_go()
        state.write_text(json.dumps(self.key))

    def _quantize_embeddings(self, solve: Solve) -> dict[str, QuantizedTensor]:
        """Before all else: what they lose, the blocks after them can make up for."""
        found: dict[str, QuantizedTensor] = {}
        weights = embeddings(self.model, self._outside)
        with atomic_folder(self.folder / EMBEDDINGS) as place:
            moments = backward_sensitivity_pass(
                self.blockwise,
                list(weights) if self.weighs_embeddings else [],
                self._inside if self.weighs_outputs else [[]] * len(self._inside),
                self.tokens,
                self.counted,
                compute=self.compute,
                folder=place,
            )
            for path, weight in weights.items():
                found |= solve({path: weight}, moments.get(path))
            mx.save_safetensors(str(place / TENSORS), _named(found))
        return found

    def _enter(self, place: Path, stream: str) -> None:
        """The hidden states in front of the first block."""
        for part, tokens in enumerate(self.tokens):
            hidden = {"hidden": self.blockwise.first(tokens)}
            activation_cache.save(place, stream, part, hidden)

    def _done(self) -> int:
        """How many blocks are behind the newest streams on disk."""
        newest = activation_cache.newest(self.folder)
        for older in self.folder.iterdir():
            if older != newest:
                activation_cache.drop(older)
        return int(newest.name)

    def _walk_block(self, number: int, solve: Solve) -> None:
        here, tensors = self.folder / f"{number:04d}", {}
        parameters = self.blockwise.blocks[number].parameters
        dtypes = {name: value.dtype for name, value in tree_flatten(parameters())}
        with (
            atomic_folder(self.folder / f"{number + 1:04d}") as after,
            self.blockwise.at_hand(number, self.compute),
        ):
            if self.prepare is not None:
                tensors |= prepare_block(
                    self.prepare,
                    self.blockwise,
                    number,
                    self._inside[number],
                    self.tokens,
                    here,
                    dtypes,
                )
            crossing = BlockCalibration(
                self.blockwise,
                number,
                self._inside[number],
                self.tokens,
                here,
                after,
                compares=self.compares,
            )
            if self.compares:
                crossing.pass_full()
            for group in crossing.groups:
                tensors |= self._quantize(number, group, crossing, solve)
            seen = {path for group in crossing.groups for path in group}
            for path in self._inside[number]:
                if path not in seen:
                    tensors |= self._quantize(number, [path], None, solve)
            if self.improve is not None:
                closed = close_block(
                    self.blockwise, number, tensors, self.tokens, here, after
                )
                tensors |= self._put(number, self.improve(closed))
                crossing.forget()
            crossing.leave()
            mx.save_safetensors(str(after / TENSORS), tensors)
        activation_cache.drop(here)
        drop_statistics(self.folder / EMBEDDINGS, number)
        self.info(f"block {number + 1} of {len(self.blockwise)} is quantized")

    def _quantize(
        self,
        number: int,
        group: list[str],
        crossing: BlockCalibration | None,
        solve: Solve,
    ) -> dict[str, mx.array]:
        """Layers of a block that share an input; of no crossing, if none was seen."""
        prefix = f"{self.blockwise.prefix}{number}."
        modules = dict(self.blockwise.blocks[number].named_modules())
        weights = {prefix + path: modules[path].weight for path in group}
        # Nobody but the solver holds the moments, so that it can let them go.
        found = solve(weights, crossing and self._moments(number, group, crossing))
        return self._put(number, found)

    def _moments(
        self, number: int, group: list[str], crossing: BlockCalibration
    ) -> InputStatistics:
        prefix, place = f"{self.blockwise.prefix}{number}.", self.folder / EMBEDDINGS
        known = squares(place, number)
        own = [known[path] for path in group if path in known]
        weights = token_weights(sum(own) if own else None, self.counted)
        found = crossing.moments(group, weights)
        known = output_hessians(place, number)
        found.answers = {prefix + path: known[path] for path in group if path in known}
        return found

    def _put(
        self, number: int, found: dict[str, QuantizedTensor]
    ) -> dict[str, mx.array]:
        """Give layers of a block the weights they stand for; what is stored of them."""
        prefix = f"{self.blockwise.prefix}{number}."
        modules = dict(self.blockwise.blocks[number].named_modules())
        for path, stored in found.items():
            dense = stored.weight.astype(self.compute)
            modules[path.removeprefix(prefix)].weight = dense
        return _named(found)

    def _finish(self, solve: Solve) -> None:
        """The layers outside the blocks."""
        target = self.folder / "outside"
        if target.is_dir():
            return
        modules = dict(self.model.named_modules())
        done = mx.load(str(self.folder / EMBEDDINGS / TENSORS))
        left = [path for path in self._outside if f"{path}.weight" not in done]
        end = self.folder / f"{len(self.blockwise):04d}"
        behind = HeadCalibration(
            self.blockwise,
            left,
            self.tokens,
            self.counted,
            end,
            compares=self.compares,
        )
        groups = behind.groups()
        seen = {path for group in groups for path in group}
        tensors: dict[str, mx.array] = {}
        for group in groups:
            weights = {path: modules[path].weight for path in group}
            tensors |= _named(solve(weights, behind.moments(group)))
        for path in left:
            if path not in seen:
                tensors |= _named(solve({path: modules[path].weight}, None))
        with atomic_folder(target) as place:
            mx.save_safetensors(str(place / TENSORS), tensors)
        self.blockwise.let_go()


def _named(layers: dict[str, QuantizedTensor]) -> dict[str, mx.array]:
    return {
        f"{path}.{name}": value
        for path, stored in layers.items()
        for name, value in stored.tensors.items()
    }


# --- from quant.calibrated: What methods that watch the layers share: the walk, and what is left to rounding.


TOKENS_PER_COLUMN = 8
LEAST_TOKENS = 1 << 15
TOKENS_AT_ONCE = 2048
KEPT_BYTES = 1 << 27


def quantize_sequentially(
    config,
    task: PTQContext,
    solve: Solve,
    prepare: Prepare | None = None,
    improve: Improve | None = None,
    *,
    compares: bool,
    weighs_embeddings: bool = True,
    weighs_outputs: bool = False,
) -> dict[str, mx.array]:
    """Walk through the model; layers whose grid is not affine are rounded.

    Args:
        config: the method's.
        prepare, improve, compares, weighs_embeddings, weighs_outputs: see `Walk`.

    Returns:
        What is stored, by name: codes, scales, biases, and dense weights that changed.
    """
    walk = _walk(
        config,
        task,
        prepare=prepare,
        improve=improve,
        compares=compares,
        weighs_embeddings=weighs_embeddings,
        weighs_outputs=weighs_outputs,
    )
    # What MLX keeps of freed memory counts, too, where a model hardly fits.
    before = mx.set_cache_limit(KEPT_BYTES)
    try:
        with malloc.low_memory():
            tensors = walk.run(_affine_alone(solve, task))
    finally:
        mx.set_cache_limit(before)
    modules = dict(task.model.named_modules())
    for path, spec in task.specs.items():
        if f"{path}.scales" not in tensors:
            task.logger.info(f"{path} is rounded to the nearest")
            # It may have had a scale folded in.
            weight = tensors.pop(f"{path}.weight", modules[path].weight)
            packed = pack(weight, spec, task.dtype)
            tensors |= {f"{path}.{name}": value for name, value in packed.items()}
    return tensors


def quantized_tensor(
    tensors: dict[str, mx.array], spec: QuantSpec, dtype: mx.Dtype
) -> QuantizedTensor:
    """Packed tensors and the weight they stand for."""
    return QuantizedTensor(tensors, expand(tensors, spec, dtype))


def _affine_alone(solve: Solve, task: PTQContext) -> Solve:
    """`solve` for layers on affine grids; there is nothing to fit in the others."""

    def solve_all(weights: dict[str, mx.array], moments) -> dict[str, QuantizedTensor]:
        fixed = {p: w for p, w in weights.items() if task.specs[p].mode != "affine"}
        found = {}
        for path, weight in fixed.items():
            task.logger.info(f"{path} is rounded to the nearest")
            spec = task.specs[path]
            found[path] = quantized_tensor(
                pack(weight, spec, task.dtype), spec, task.dtype
            )
        affine = {p: w for p, w in weights.items() if p not in fixed}
        return found | solve(affine, moments) if affine else found

    return solve_all


def _walk(config, task: PTQContext, **settings) -> SequentialPipeline:
    modules = dict(task.model.named_modules())
    widest = max(modules[path].weight.shape[-1] for path in task.specs)
    wanted = max(LEAST_TOKENS, TOKENS_PER_COLUMN * widest)
    windows = task.windows(config.calibration.num_tokens or wanted)
    if windows.size < TOKENS_PER_COLUMN * widest:
        task.logger.warning(
            f"calibration has {windows.size:,} tokens; a layer {widest} wide wants "
            f"{TOKENS_PER_COLUMN * widest:,}"
        )
    key = hashlib.sha256(windows.tokens.tobytes() + windows.counted.tobytes())
    key.update(config.model_dump_json().encode())
    key.update(repr(sorted(task.specs.items())).encode())
    return SequentialPipeline(
        task.model,
        list(task.specs),
        windows,
        task.folder / "walk",
        key=key.hexdigest(),
        compute=mx.float32 if on_cpu() else task.dtype,
        at_once=TOKENS_AT_ONCE,
        info=task.logger.info,
        reread=task.reread,
        **settings,
    )
