"""One walk through a model, block by block, in two streams of hidden states.

One stream has the full-precision blocks behind it, the other the quantized ones, so
every layer is quantized for the inputs it will get. A method that compares nothing with
full precision does without the first. Weights and second moments of one
block are in memory at a time; the streams and all that is done are on disk, and a walk
that was killed goes on at the block where it stopped.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..model.blockwise import Blockwise
from ..run.files import atomic_folder
from . import streams
from .behind import Behind
from .closed import Closed, close_block
from .costs import answers, drop_found, look_ahead, squares
from .crossing import Crossing
from .embeddings import embeddings, given
from .inputs import Moments
from .opened import Prepare, prepare_block
from .streams import FULL, ROUNDED
from .token_weights import token_weights

if TYPE_CHECKING:
    from ..data.windows import Windows

TENSORS = "tensors.safetensors"
EMBEDDINGS = "embeddings"


@dataclass(frozen=True)
class Stored:
    """A layer as it is stored, and the dense weight it stands for."""

    tensors: dict[str, mx.array]
    weight: mx.array


# Quantizes layers that share an input: weights by path, what is known of that input,
# None when no hidden state goes into them.
Solve = Callable[[dict[str, mx.array], Moments | None], dict[str, Stored]]
# Gives layers of a block something better, once it is quantized; by path.
Improve = Callable[[Closed], dict[str, Stored]]


class Walk:
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
        windows: "Windows",
        folder: Path,
        *,
        key: str,
        compute: mx.Dtype,
        at_once: int,
        say: Callable[[str], None],
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
        self.say = say
        self.prepare = prepare
        self.improve = improve
        self.compares = compares
        self.weighs_embeddings = weighs_embeddings
        self.weighs_outputs = weighs_outputs
        self.blockwise = Blockwise(model, reread)
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

    def _quantize_embeddings(self, solve: Solve) -> dict[str, Stored]:
        """Before all else: what they lose, the blocks after them can make up for."""
        found: dict[str, Stored] = {}
        weights = embeddings(self.model, self._outside)
        with atomic_folder(self.folder / EMBEDDINGS) as place:
            moments = look_ahead(
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
            streams.save(place, stream, part, hidden)

    def _done(self) -> int:
        """How many blocks are behind the newest streams on disk."""
        newest = streams.newest(self.folder)
        for older in self.folder.iterdir():
            if older != newest:
                streams.drop(older)
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
            crossing = Crossing(
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
        streams.drop(here)
        drop_found(self.folder / EMBEDDINGS, number)
        self.say(f"block {number + 1} of {len(self.blockwise)} is quantized")

    def _quantize(
        self, number: int, group: list[str], crossing: Crossing | None, solve: Solve
    ) -> dict[str, mx.array]:
        """Layers of a block that share an input; of no crossing, if none was seen."""
        prefix = f"{self.blockwise.prefix}{number}."
        modules = dict(self.blockwise.blocks[number].named_modules())
        weights = {prefix + path: modules[path].weight for path in group}
        # Nobody but the solver holds the moments, so that it can let them go.
        found = solve(weights, crossing and self._moments(number, group, crossing))
        return self._put(number, found)

    def _moments(self, number: int, group: list[str], crossing: Crossing) -> Moments:
        prefix, place = f"{self.blockwise.prefix}{number}.", self.folder / EMBEDDINGS
        known = squares(place, number)
        own = [known[path] for path in group if path in known]
        weights = token_weights(sum(own) if own else None, self.counted)
        found = crossing.moments(group, weights)
        known = answers(place, number)
        found.answers = {prefix + path: known[path] for path in group if path in known}
        return found

    def _put(self, number: int, found: dict[str, Stored]) -> dict[str, mx.array]:
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
        behind = Behind(
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


def _named(layers: dict[str, Stored]) -> dict[str, mx.array]:
    return {
        f"{path}.{name}": value
        for path, stored in layers.items()
        for name, value in stored.tensors.items()
    }
