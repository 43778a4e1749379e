"""One walk through a model, block by block, in two streams of hidden states.

One stream has the full-precision blocks behind it, the other the quantized ones, so
every layer is quantized for the inputs it will get. Weights and second moments of one
block are in memory at a time; the streams and all that is done are on disk, and a walk
that was killed goes on at the block where it stopped.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import UserError
from ..model.blocks import StandIn, find_blocks, swapped
from ..run.files import atomic_folder, need_space
from . import streams
from .inputs import Moments, Seen, watched

TENSORS = "tensors.safetensors"


@dataclass(frozen=True)
class Stored:
    """A layer as it is stored, and the dense weight it stands for."""

    tensors: dict[str, mx.array]
    weight: mx.array


# Quantizes layers that share an input: weights by path, what is known of that input.
Solve = Callable[[dict[str, mx.array], Moments], dict[str, Stored]]


class Walk:
    """Leads a method through the blocks of a model.

    Args:
        model: its weights may be lazy; those of a block are let go once it is done.
        paths: of the layers to quantize.
        tokens: int32 [n, L], calibration windows.
        folder: where the walk keeps its state.
        key: what the walk depends on besides; another key begins anew.
        compute: the type to run blocks in.
        rows: windows at once.

    Raises:
        UserError: the model is not a plain sequence of blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        paths: list[str],
        tokens: mx.array,
        folder: Path,
        *,
        key: str,
        compute: mx.Dtype,
        rows: int,
        say: Callable[[str], None],
    ):
        self.model = model
        self.tokens = [tokens[i : i + rows] for i in range(0, len(tokens), rows)]
        self.folder = folder
        self.key = key
        self.compute = compute
        self.say = say
        blocks = find_blocks(model)
        if blocks is None:
            raise UserError(
                "this model has no list of blocks to walk through", hint="method: rtn"
            )
        self._trunk, self._name = blocks.trunk, blocks.name
        self._blocks = list(blocks.trunk[blocks.name])
        self._prefix = blocks.prefix
        self._inside: list[list[str]] = [[] for _ in self._blocks]
        self.outside = []
        for path in paths:
            if path.startswith(self._prefix):
                number, _, rest = path.removeprefix(self._prefix).partition(".")
                self._inside[int(number)].append(rest)
            else:
                self.outside.append(path)

    def run(self, solve: Solve) -> dict[str, mx.array]:
        """Walk to the end.

        Returns:
            Codes, scales and biases by name, lazy, of all layers met on the way.
        """
        self._begin()
        for number in range(self._done(), len(self._blocks)):
            self._walk_block(number, solve)
        self._finish(solve)
        files = sorted(self.folder.glob(f"*/{TENSORS}"))
        return {
            name: value for file in files for name, value in mx.load(str(file)).items()
        }

    def _begin(self) -> None:
        """Make the streams in front of the first block, unless that is done."""
        state = self.folder / "walk.json"
        if state.is_file() and json.loads(state.read_text()) == self.key:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self._check_sequence()
        with atomic_folder(self.folder / "0000") as place:
            for number, tokens in enumerate(self.tokens):
                hidden = self._arguments(0, tokens)[0][0]
                if number == 0:
                    need_space(self.folder, 4 * len(self.tokens) * hidden.nbytes)
                streams.save(place, number, hidden, hidden)
        state.write_text(json.dumps(self.key))

    def _done(self) -> int:
        """How many blocks are behind the newest streams on disk."""
        found = sorted(self.folder.glob(f"*/{streams.NAME}-0000.safetensors"))
        for older in found[:-1]:
            streams.drop(older.parent)
        return int(found[-1].parent.name)

    def _walk_block(self, number: int, solve: Solve) -> None:
        block, paths = self._blocks[number], self._inside[number]
        here = self.folder / f"{number:04d}"
        prefix = f"{self._prefix}{number}."
        full = {k: self._cast(v) for k, v in tree_flatten(block.parameters())}
        _put(block, full)
        rounded = dict(full)
        tensors: dict[str, mx.array] = {}
        for group in self._groups(number, paths):
            moments = self._moments(number, group, full, rounded)
            weights = {prefix + path: rounded[f"{path}.weight"] for path in group}
            for path, stored in solve(weights, moments).items():
                name = f"{path.removeprefix(prefix)}.weight"
                rounded[name] = stored.weight.astype(self.compute)
                tensors |= {f"{path}.{k}": v for k, v in stored.tensors.items()}
        with atomic_folder(self.folder / f"{number + 1:04d}") as after:
            for part in range(len(self.tokens)):
                hidden = streams.load(here, part)
                outputs = self._forward(number, part, hidden, full, rounded)
                streams.save(after, part, *outputs)
            mx.save_safetensors(str(after / TENSORS), tensors)
        streams.drop(here)
        # Lets the weights go.
        _put(block, {name: mx.zeros(0, value.dtype) for name, value in full.items()})
        mx.clear_cache()
        self.say(f"block {number + 1} of {len(self._blocks)} is quantized")

    def _finish(self, solve: Solve) -> None:
        """The layers outside the blocks that the last hidden states go into."""
        target = self.folder / "outside"
        if target.is_dir():
            return
        here = self.folder / f"{len(self._blocks):04d}"
        tensors: dict[str, mx.array] = {}
        modules = dict(self.model.named_modules())
        for group in self._outside_groups(here):
            moments = None
            for part, tokens in enumerate(self.tokens):
                full, rounded = streams.load(here, part)
                y = self._seen_outside(group[:1], full, tokens).rows[group[0]]
                x = self._seen_outside(group[:1], rounded, tokens).rows[group[0]]
                moments = moments or Moments.empty(
                    x.shape[-1], experts=None, with_cross=True
                )
                moments.add(x, y)
            weights = {path: self._cast(modules[path].weight) for path in group}
            for path, stored in solve(weights, moments).items():
                tensors |= {f"{path}.{k}": v for k, v in stored.tensors.items()}
        with atomic_folder(target) as place:
            mx.save_safetensors(str(place / TENSORS), tensors)

    def _groups(self, number: int, paths: list[str]) -> list[list[str]]:
        """The block's layers that share an input, in the order of their calls."""
        full, _ = streams.load(self.folder / f"{number:04d}", 0)
        with watched(self._blocks[number], paths) as seen:
            self._run(number, self.tokens[0][:1], full[:1])
        return seen.groups()

    def _moments(self, number: int, group: list[str], full, rounded) -> Moments:
        block, first = self._blocks[number], group[0]
        here = self.folder / f"{number:04d}"
        weight = rounded[f"{first}.weight"]
        experts = weight.shape[0] if weight.ndim == 3 else None
        found = Moments.empty(
            weight.shape[-1], experts=experts, with_cross=experts is None
        )
        for part, tokens in enumerate(self.tokens):
            both = streams.load(here, part)
            seen: list[Seen] = []
            for hidden, weights in zip(both, (full, rounded), strict=True):
                _put(block, weights)
                with watched(block, [first]) as look:
                    self._run(number, tokens, hidden)
                seen.append(look)
            y, x = (look.rows[first] for look in seen)
            if experts is None:
                found.add(x, y)
            else:
                found.add_routed(x, seen[1].experts[first])
        return found

    def _forward(self, number: int, part: int, both, full, rounded):
        block, tokens = self._blocks[number], self.tokens[part]
        outputs = []
        for hidden, weights in zip(both, (full, rounded), strict=True):
            _put(block, weights)
            outputs.append(self._run(number, tokens, hidden))
        mx.eval(outputs)
        return outputs

    def _run(self, number: int, tokens: mx.array, hidden: mx.array) -> mx.array:
        """What a block makes of hidden states [B, L, width]."""
        arguments, settings = self._arguments(number, tokens)
        return self._blocks[number](hidden, *arguments[1:], **settings)

    def _arguments(self, number: int, tokens: mx.array) -> tuple[tuple, dict]:
        """What the model calls a block with, were all before it the identity."""
        calls: dict[int, tuple] = {}

        def passing(index: int):
            def call(*arguments, **settings):
                calls[index] = (arguments, settings)
                return arguments[0]

            return call

        with self._replaced([passing(i) for i in range(len(self._blocks))]):
            self.model(tokens)
        return calls[number]

    def _logits(self, hidden: mx.array, tokens: mx.array) -> mx.array:
        """What comes after the blocks, of the last one's output."""
        blocks = [lambda *_, **__: hidden] + [lambda x, *_, **__: x] * len(self._blocks)
        with self._replaced(blocks[: len(self._blocks)]):
            return self.model(tokens)

    def _replaced(self, calls: list):
        stand_ins = [
            StandIn(block, call)
            for block, call in zip(self._blocks, calls, strict=True)
        ]
        return swapped(self._trunk, self._name, stand_ins)

    def _outside_groups(self, here: Path) -> list[list[str]]:
        full, _ = streams.load(here, 0)
        seen = self._seen_outside(self.outside, full[:1], self.tokens[0][:1])
        return seen.groups()

    def _seen_outside(self, paths: list[str], hidden, tokens: mx.array) -> Seen:
        with watched(self.model, paths) as seen:
            self._logits(hidden, tokens)
        return seen

    def _check_sequence(self) -> None:
        """That block after block makes what the model makes."""
        tokens = self.tokens[0][:1, :8]
        try:
            hidden = self._arguments(0, tokens)[0][0]
            for number in range(len(self._blocks)):
                hidden = self._run(number, tokens, hidden)
            off = mx.abs(self._logits(hidden, tokens) - self.model(tokens))
        except (AttributeError, TypeError, KeyError, ValueError) as error:
            raise self._no_sequence(error) from error
        if not (off.max() <= 1e-3 * mx.abs(self.model(tokens)).max()).item():
            raise self._no_sequence("other logits come out")

    def _no_sequence(self, reason) -> UserError:
        return UserError(
            f"the blocks of this model cannot be run one by one: {reason}",
            hint="method: rtn",
        )

    def _cast(self, value: mx.array) -> mx.array:
        is_float = mx.issubdtype(value.dtype, mx.floating)
        return value.astype(self.compute) if is_float else value


def _put(block: nn.Module, weights: dict[str, mx.array]) -> None:
    block.update(tree_unflatten(list(weights.items())))
